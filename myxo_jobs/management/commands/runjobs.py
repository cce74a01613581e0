"""`manage.py runjobs`: run a worker in this process until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from argparse import ArgumentParser
from contextlib import suppress
from types import FrameType
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import InterfaceError, OperationalError, connections

from myxo_jobs import checks
from myxo_jobs.worker import Worker

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WAIT_SECONDS = 0.5


class Command(BaseCommand):
    help = "Run the jobs of the topics that have a handler here, until SIGTERM or SIGINT."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--topics", help="only these, separated by commas")
        parser.add_argument("--exclude", help="all but these, separated by commas")
        parser.add_argument("--workers", type=int, help="slots of every topic, instead of its own")
        parser.add_argument("--drain", action="store_true", help="exit once nothing is due")
        parser.add_argument(
            "--grace", type=float, help="seconds that running jobs get to end (grace_seconds)"
        )
        parser.add_argument(
            "--poll", type=float, help="seconds after which an idle worker looks (poll_seconds)"
        )
        parser.add_argument("--using", help="alias of the queue's database")

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Run the system checks, as far as a database that is away now lets them.

        From Django 6.1 on, those of a model with a generated column connect to it.
        """
        with suppress(OperationalError, InterfaceError):
            super().check(*args, **kwargs)

    def handle(self, **options: Any) -> None:
        _check(options)
        try:
            worker = Worker(
                topics=_names(options["topics"]),
                exclude=_names(options["exclude"]),
                workers=options["workers"],
                using=options["using"],
                drain=options["drain"],
                grace=options["grace"],
                poll=options["poll"],
            )
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        _refuse_what_cannot_work(worker)
        _show_events()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, _Stop(worker))
        worker.start()
        while not worker.join(WAIT_SECONDS):
            pass
        if any(thread.name.startswith("myxo_jobs") for thread in threading.enumerate()):
            # A handler did not end within the grace; its job was given back.
            _exit_now(0)


class _Stop:
    """Drains at the first signal, and leaves at the second."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            _exit_now(128 + number)
        self._asked = True
        self._worker.request_stop()


def _exit_now(status: int) -> None:
    """End the process, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _check(options: dict[str, Any]) -> None:
    if options["using"] is not None and options["using"] not in connections:
        raise CommandError(f"--using {options['using']}: DATABASES has {', '.join(connections)}")
    if options["workers"] is not None and options["workers"] < 1:
        raise CommandError(f"--workers takes a whole number from 1, not {options['workers']}")
    if options["grace"] is not None and not options["grace"] >= 0:
        raise CommandError(f"--grace takes seconds from 0, not {options['grace']}")
    if options["poll"] is not None and not options["poll"] > 0:
        raise CommandError(f"--poll takes seconds above 0, not {options['poll']}")


def _refuse_what_cannot_work(worker: Worker) -> None:
    """Raise CommandError for a database in which this worker could not do its jobs.

    One that is away now is waited for.
    """
    alias = worker.alias
    found = checks.memory(alias)
    found += checks.pool_too_small(alias, checks.connections_needed(worker.handlers))
    try:
        found += checks.table(alias)
    except (OperationalError, InterfaceError):
        pass
    finally:
        connections[alias].close()
    if found:
        raise CommandError("\n".join(f"{message.msg} {message.hint}" for message in found))


def _show_events() -> None:
    """Show the worker's events on standard error where the project logs them nowhere."""
    logger = logging.getLogger("myxo_jobs")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
