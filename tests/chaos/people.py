"""Who asks the web site of a run: made, and signed in, by a process with its settings."""

from __future__ import annotations

import django
import msgspec

NAMES = ("ada", "eve", "root")


class Person(msgspec.Struct, frozen=True):
    """Somebody with a browser, signed in; nobody without a key."""

    key: str = ""
    session: str = ""

    @property
    def owner(self) -> dict[str, str]:
        """The owner of a job, as `enqueue` takes it."""
        return {"owner_kind": "auth.user", "owner_id": self.key}


def make() -> dict[str, Person]:
    """Make the tables of the site, and these people; root may see everything."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    call_command("migrate", verbosity=0)
    people = {}
    for name in NAMES:
        is_root = name == "root"
        user = User.objects.create_user(name, is_staff=is_root, is_superuser=is_root)
        client = Client()
        client.force_login(user)
        people[name] = Person(str(user.pk), client.cookies["sessionid"].value)
    return people


if __name__ == "__main__":
    django.setup()
    print(msgspec.json.encode(make()).decode())
