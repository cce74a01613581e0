"""A backend of django.tasks: dj-queue, django-ox or django-tasks-db."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import django

django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import transaction  # noqa: E402

from tests.benchmarks.peers.settings import PEER  # noqa: E402
from tests.benchmarks.peers.tasks import noop  # noqa: E402


def install() -> None:
    call_command("migrate", verbosity=0)


def enqueue(number: int) -> None:
    noop.enqueue(number=number)


def enqueue_all(numbers: Iterable[int]) -> None:
    backend: Any = noop.get_backend()
    if PEER == "dj_queue":
        backend.enqueue_all([(noop, [], {"number": number}) for number in numbers])
    elif PEER == "django_ox":
        backend.enqueue_many(noop, [((), {"number": number}) for number in numbers])
    else:
        with transaction.atomic():
            for number in numbers:
                noop.enqueue(number=number)
