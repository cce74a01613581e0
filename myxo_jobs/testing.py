"""For test suites: run the jobs that a test has put, in process, and list them.

`run_jobs` and `put_jobs` work where nothing ever commits: in a TestCase and with
pytest-django's `db`. `Worker` is the real worker, for tests that do commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from myxo_jobs import queue, worker
from myxo_jobs.errors import Steering
from myxo_jobs.handlers import Handler, registry
from myxo_jobs.models import Job
from myxo_jobs.queue import Claim, Tokens
from myxo_jobs.worker.running import (
    FINAL_FAILURES,
    Outcome,
    Surroundings,
    cancelled_unrun,
    outcome_of,
    run,
    run_async,
    see_off,
)
from myxo_jobs.worker.settling import STORES

__all__ = ["Worker", "put_jobs", "run_jobs"]

MOST_JOBS = 1_000

R = TypeVar("R", bound=msgspec.Struct)


class Worker(worker.Worker):
    """A real worker in this process, from any thread: `start()`, `stop()`, or a `with` block.

    It leaves the files alone that no row of the test's database names.
    """

    tidies = False


class _RollBack(Exception):  # noqa: N818 - never leaves this module
    """Undoes what a handler that did not return has written."""


def run_jobs(
    delayed: bool = False,
    topics: Sequence[str] | None = None,
    raise_errors: bool = True,
) -> int:
    """Run what is due, one job after the other, until nothing is; return how many ran.

    On the caller's own connection, each handler in a savepoint, so that it sees what the
    test wrote and goes with it. Highest priority first, then earliest due, then id; jobs
    put by jobs run, too; at most 1,000. `delayed` runs those that are due later as well,
    and `topics` only some.

    Raises what a handler raised, the job then being as it was; with `raise_errors=False`
    it is recorded instead, as a worker would. `Retry`, `Snooze` and `GiveUp` always are.
    """
    connection = connections[queue.alias()]
    tokens = Tokens()
    count = 0
    while count < MOST_JOBS:
        claim = _claim_next(connection, tokens.next(), delayed, topics)
        if claim is None:
            break
        count += 1
        outcome = _run(connection, claim)
        raised = outcome.raised
        if raised is not None and raise_errors and not isinstance(raised, Steering):
            queue.give_back(connection, [claim])
            raise raised
        STORES[outcome.verb](connection, [outcome])
    return count


def put_jobs(request: type[R] | None = None) -> list[R]:
    """Return the requests of the jobs in the queue, oldest first; a done one has left.

    `request` chooses those of one Struct.
    """
    rows = Job.objects.filter(due__isnull=False).order_by("pk")
    handlers = {handler.topic: handler for handler in registry}
    return [
        handlers[topic].codec.decode(payload)
        for topic, payload in rows.values_list("topic", "payload")
        if topic in handlers and request in (None, handlers[topic].request)
    ]


def _claim_next(
    connection: BaseDatabaseWrapper, token: str, delayed: bool, topics: Sequence[str] | None
) -> Claim | None:
    found = _next_due(connection, registry.choose(topics), delayed)
    if found is None:
        return None
    row, handler = found
    if delayed:
        Job.objects.using(connection.alias).filter(pk=row["pk"], due__gt=Now()).update(due=Now())
    # Atomic or not, here every handler has a savepoint of the caller's transaction.
    handler = msgspec.structs.replace(handler, atomic=False, limit=None)
    claims = queue.claim(connection, handler, 1, token=token, on_suspect="skip", joined=True)
    return claims[0] if claims else None


def _next_due(
    connection: BaseDatabaseWrapper, served: dict[str, Handler], delayed: bool
) -> tuple[dict[str, Any], Handler] | None:
    """Return the first job in the line that is not of a paused topic, and its handler."""
    rows = Job.objects.using(connection.alias).filter(failed=False, worker="", due__isnull=False)
    if not delayed:
        rows = rows.filter(due__lte=Now())
    rows = rows.order_by("-priority", "due", "pk")
    while True:
        row = rows.filter(topic__in=served).values("pk", "topic").first()
        if row is None:
            return None
        (handler,) = queue.present(connection, [served[row["topic"]]])
        if handler.limit != 0:
            return row, handler
        served = {topic: one for topic, one in served.items() if topic != row["topic"]}


def _run(connection: BaseDatabaseWrapper, claim: Claim) -> Outcome:
    around = Surroundings(
        alias=connection.alias,
        is_stopping=lambda: False,
        extend=lambda claim, seconds: None,
        limits=None,
        starts=lambda claim: None,
    )
    try:
        with transaction.atomic(using=connection.alias):
            if claim.cancelled:
                outcome = cancelled_unrun(claim)
            elif claim.handler.is_async:
                outcome = async_to_sync(run_async)(claim, around)
            else:
                outcome = run(claim, around)
            if outcome.verb not in ("complete", "keep"):
                raise _RollBack
            connection.validate_no_broken_transaction()
    except _RollBack:
        pass
    except DatabaseError as error:
        # The handler went on after a failed statement: its savepoint cannot be kept.
        outcome = outcome_of(claim, error)
    if outcome.verb in FINAL_FAILURES:
        see_off(outcome, connection.alias)
    return outcome
