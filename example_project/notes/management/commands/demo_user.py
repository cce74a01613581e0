"""`manage.py demo_user`: a user for looking around in the admin."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

NAME = PASSWORD = "admin"


def make_demo_user() -> bool:
    """Make the user admin, with the password admin, who may do everything; False if there."""
    users = get_user_model()._default_manager
    if users.filter(username=NAME).exists():
        return False
    users.create_superuser(username=NAME, email="", password=PASSWORD)
    return True


class Command(BaseCommand):
    help = "Make the user admin, with the password admin. Only with DEBUG."

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEBUG:
            raise CommandError("a user whose password everybody knows is made with DEBUG only")
        if make_demo_user():
            self.stdout.write(f"made the user {NAME}, password {PASSWORD}")
        else:
            self.stdout.write(f"a user {NAME} is there already, and stays as it is")
