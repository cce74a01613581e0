"""Who puts jobs, and keeps outside the database what became of each put."""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import psycopg
from django.db import DatabaseError, InterfaceError, connection, transaction

from myxo_jobs import Jobs
from myxo_jobs.services import enqueue, get_job

Outcome = Literal["acknowledged", "rolled back", "refused", "unknown", "key was there"]
Make = Callable[[int, random.Random], msgspec.Struct]

ROLLBACKS = 0.1
IN_A_BLOCK = 0.3


class Put(msgspec.Struct, frozen=True):
    """A put and its outcome; `number` is the request's."""

    number: int
    request: Any
    outcome: Outcome
    job_id: int | None
    at: float  # when its outcome was known, by the monotonic clock


class _TurnBackError(Exception):
    """What turns a transaction back."""


def _is_disk_full(error: Exception) -> bool:
    """Tell whether the database has refused a write for want of space: then nothing is there."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return cause.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(cause, psycopg.errors.DiskFull)


class Oracle:
    """Puts jobs from threads, each with a connection of its own."""

    def __init__(self) -> None:
        self.puts: list[Put] = []
        self.errors: list[str] = []
        self._jobs = Jobs()
        self._numbers = itertools.count(1)
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def number(self) -> int:
        """Return a number that no other request has."""
        return next(self._numbers)

    def start(self, make: Make, *, rate: float, seed: str, threads: int = 2) -> None:
        """Put what `make` returns, so many a second, until stopped."""
        for place in range(threads):
            chance = random.Random(f"{seed} {place} {len(self._threads)}")
            thread = threading.Thread(
                target=self._serve, args=(make, threads / rate, chance), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def put(self, request: Any, **options: Any) -> Put:
        """Put a request in a transaction of its own."""
        try:
            job_id = self._jobs.put(request, **options)
        except (DatabaseError, InterfaceError) as error:
            outcome: Outcome = "refused" if _is_disk_full(error) else "unknown"
            return self._note(request, outcome, None, error)
        return self._note(request, "key was there" if job_id is None else "acknowledged", job_id)

    def enqueue(self, kind: str, payload: dict[str, Any], **options: Any) -> str:
        """Put a job of a service, that nothing keeps from being put; return its uid."""
        number = self.number()
        uid = enqueue(kind, {"number": number, **payload}, **options)
        job = get_job(uid)
        assert job is not None
        put = Put(number, payload, "acknowledged", job.pk, time.monotonic())
        self.puts.append(put)
        return uid

    def put_in_a_block(
        self, request: Any, *, rolls_back: bool, holds: float = 0.0, **options: Any
    ) -> Put:
        """Put a request in a transaction that commits, or is turned back, after some seconds."""
        job_id = None
        was_put = False
        try:
            with transaction.atomic():
                job_id = self._jobs.put(request, **options)
                was_put = True
                time.sleep(holds)
                if rolls_back:
                    raise _TurnBackError
        except _TurnBackError:
            return self._note(request, "rolled back", job_id)
        except (DatabaseError, InterfaceError) as error:
            # Unless the commit was under way the transaction ended with its connection.
            outcome: Outcome = "unknown" if was_put and not rolls_back else "rolled back"
            if _is_disk_full(error):
                outcome = "refused"
            return self._note(request, outcome, job_id, error)
        return self._note(request, "key was there" if job_id is None else "acknowledged", job_id)

    def _note(
        self,
        request: Any,
        outcome: Outcome,
        job_id: int | None,
        error: Exception | None = None,
    ) -> Put:
        if error is not None:
            self.errors.append(f"{type(error).__name__}: {error}".strip())
            connection.close()
        put = Put(request.number, request, outcome, job_id, time.monotonic())
        self.puts.append(put)
        return put

    def _serve(self, make: Make, pause: float, chance: random.Random) -> None:
        following = time.monotonic()
        while not self._stopped.is_set():
            request = make(self.number(), chance)
            draw = chance.random()
            if draw < ROLLBACKS + IN_A_BLOCK:
                put = self.put_in_a_block(request, rolls_back=draw < ROLLBACKS)
            else:
                put = self.put(request)
            if put.outcome in ("unknown", "refused", "rolled back"):
                following = max(following, time.monotonic() - 1)
            following += pause * chance.uniform(0.5, 1.5)
            self._stopped.wait(max(following - time.monotonic(), 0.0))
        connection.close()
