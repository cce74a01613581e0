"""What myxo_jobs does in a scenario. Times are seconds unless a name says otherwise."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import django

django.setup()

from django.db import OperationalError, connection, transaction  # noqa: E402

from myxo_jobs.models import Job  # noqa: E402
from myxo_jobs.worker import Worker  # noqa: E402
from tests.benchmarks import jobs as handlers  # noqa: E402
from tests.benchmarks.actor import Cue  # noqa: E402
from tests.benchmarks.jobs import Timed, Unserved, evidence, jobs  # noqa: E402
from tests.benchmarks.sides import raw  # noqa: E402

#: After so long without the last job the run is given up, and the evidence tells why.
PATIENCE = 170.0


def fill(request: str, count: int) -> None:
    """Put so many jobs."""
    make = getattr(handlers, request)
    assert jobs.put_many(make(number) for number in range(count)) == count


def _worker(topics: list[str], workers: int | None) -> Worker:
    """Make a worker as `runjobs` does: one that has its process to itself."""
    return Worker(topics=topics, workers=workers, watchdog=True)


def drain(cue: Cue, topic: str, count: int, workers: int | None = None) -> dict[str, Any]:
    """Run all jobs with one worker; the time ends when the last row has left, or is kept."""
    evidence.expected = count
    worker = _worker([topic], workers)
    connection.ensure_connection()
    cue.ready()
    began, cpu = time.monotonic(), time.process_time()
    with worker:
        evidence.all_seen.wait(PATIENCE)
        waiting = Job.objects.filter(topic=topic, due__isnull=False)
        while waiting.exists() and time.monotonic() - began < PATIENCE:
            time.sleep(0.002)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu": cpu,
        "numbers": evidence.numbers,
        "moments": evidence.moments,
    }


def work(cue: Cue, topics: list[str], workers: int | None = None) -> dict[str, Any]:
    """Run a worker until told to stop."""
    with _worker(topics, workers):
        time.sleep(0.5)  # until it is idle, or busy
        cue.ready()
        cue.wait_for_word()
    return {"numbers": evidence.numbers, "moments": evidence.moments}


def put(cue: Cue, seconds: float) -> dict[str, float]:
    """Put one job after the other, each in a transaction of its own."""
    jobs.put(Unserved(0))
    cue.ready()
    return in_a_row(lambda number: jobs.put(Unserved(number)), seconds)


def in_a_row(action: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Do something again and again for so long; return how often, and how long it took."""
    began = now = time.monotonic()
    count = 0
    while now - began < seconds:
        action(count)
        count += 1
        now = time.monotonic()
    return {"count": count, "seconds": now - began}


def put_all(cue: Cue, first: int, count: int, request: str = "Timed") -> dict[str, float]:
    """Put so many jobs as quickly as it goes; return when it began and ended."""
    make = getattr(handlers, request)
    connection.ensure_connection()
    cue.ready()
    began = time.monotonic()
    for number in range(first, first + count):
        jobs.put(make(number))
    return {"began": began, "ended": time.monotonic()}


def put_at_a_pace(
    cue: Cue, first: int, pauses: list[float], request: str = "Timed", priority: int = 0
) -> list[tuple[int, float]]:
    """Put a job after each pause; return each one's number and the moment before its put.

    The pauses are counted from plan to plan: a late put does not make the next later.
    """
    make = getattr(handlers, request)
    connection.ensure_connection()
    cue.ready()
    moments = []
    planned = time.monotonic()
    for number, pause in enumerate(pauses, first):
        planned += pause
        time.sleep(max(planned - time.monotonic(), 0.0))
        moments.append((number, time.monotonic()))
        jobs.put(make(number), priority=priority)
    return moments


def put_beside(cue: Cue, first: int, rate: float, seconds: float) -> dict[str, Any]:
    """Put jobs at random moments, so many a second; return when, and how many were refused.

    A refused put counts as tried: the next is not made up for. `behind` is how many seconds
    the last one was late, since those before it took too long.
    """
    moments: list[tuple[int, float]] = []

    def put_one(number: int) -> None:
        before = time.monotonic()
        jobs.put(Timed(number))
        moments.append((number, before))

    errors, behind = _at_random_moments(cue, put_one, first, rate, seconds)
    return {"moments": moments, "errors": errors, "behind": behind}


def write_beside(cue: Cue, rate: float, seconds: float) -> dict[str, Any]:
    """Do a project's own writes at random moments; return how many were refused."""
    errors, behind = _at_random_moments(cue, handlers.update_by_orm, 0, rate, seconds)
    return {"errors": errors, "behind": behind}


def _at_random_moments(
    cue: Cue, action: Callable[[int], object], first: int, rate: float, seconds: float
) -> tuple[int, float]:
    """Do something, as independent callers would.

    Return how often the database refused, and how many seconds the last time was late.
    """
    connection.ensure_connection()
    cue.ready()
    errors, behind = 0, 0.0
    number = first
    began = planned = time.monotonic()
    while True:
        planned += random.expovariate(rate)
        if planned > began + seconds or time.monotonic() > began + 2 * seconds:
            return errors, behind
        time.sleep(max(planned - time.monotonic(), 0.0))
        behind = time.monotonic() - planned
        try:
            action(number)
        except OperationalError:
            errors += 1
        number += 1


def put_many(cue: Cue, count: int, times: int) -> dict[str, float]:
    """Put so many jobs at once, a few times, from requests that are there already."""
    requests = [Unserved(number) for number in range(count)]
    jobs.put(Unserved(0))
    cue.ready()
    began = time.monotonic()
    for _ in range(times):
        assert jobs.put_many(requests) == count
    return {"count": count * times, "seconds": time.monotonic() - began}


def put_atomic(cue: Cue, times: int) -> dict[str, float]:
    """Return the median microseconds of a transaction up to its commit: bare, raw and ours.

    Bare it only writes a row of the caller's; the others also put a job.
    """

    def transaction_with(put: Callable[[int], object], number: int) -> float:
        began = time.perf_counter()
        with transaction.atomic():
            handlers.update_by_orm(number)
            put(number)
            return (time.perf_counter() - began) * 1e6

    kinds: dict[str, Callable[[int], object]] = {
        "bare": lambda number: None,
        "raw": raw.inserting(),
        "ours": lambda number: jobs.put(Unserved(number)),
    }
    cue.ready()
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(times):
        # In no fixed order: what a transaction leaves behind, the next one may pay for.
        for kind in random.sample(list(kinds), len(kinds)):
            taken[kind].append(transaction_with(kinds[kind], number))
    return {kind: statistics.median(times) for kind, times in taken.items()}


def claim(cue: Cue, topic: str, batch: int, times: int, where: str = "") -> dict[str, Any]:
    """Return the milliseconds of claims of so many jobs, of full passes, and of looks.

    The claims begin where the last one ended, and now and then at the beginning, as a
    worker's do; the full passes and the looks for due jobs always begin there. What was
    claimed is deleted, as when it is done, and after each thousand jobs as many are put.
    `where` is the schema or the file of the table.
    """
    from myxo_jobs import queue
    from myxo_jobs.databases import Floors, database_of
    from myxo_jobs.handlers import registry

    handler = registry.of_topic(topic)
    assert handler is not None
    _turn_to(where)
    tokens, floors = queue.Tokens(), Floors()
    database = database_of(connection)
    cue.ready()
    taken: dict[str, list[float]] = {"claims": [], "full passes": [], "looks": []}

    def time_claim(kind: str, floors: Floors | None) -> None:
        began = time.perf_counter()
        claimed = queue.claim(connection, handler, batch, token=tokens.next(), floors=floors)
        taken[kind].append((time.perf_counter() - began) * 1e3)
        assert len(claimed) == batch, f"{len(claimed)} claimed"
        queue.complete(connection, claimed)

    for turn in range(times):
        began = time.perf_counter()
        assert database.look(connection, {topic: None}, 1.0) == {topic: 0.0}
        taken["looks"].append((time.perf_counter() - began) * 1e3)
        time_claim("claims", floors)
        time_claim("full passes", None)
        if (turn + 1) * 2 * batch % 1_000 == 0:
            jobs.put_many(handler.request(number) for number in range(1_000))
    return taken


def _turn_to(where: str) -> None:
    if not where:
        return
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"SET search_path = {where}, public")
    else:
        connection.close()
        connection.settings_dict["NAME"] = where
