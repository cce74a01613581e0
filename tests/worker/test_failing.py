"""A job that raises is tried again, and then kept for a person."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from django.db import connection

from myxo_jobs import Jobs, Run, job
from myxo_jobs.models import Job
from tests.rig import ago, make_job, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str


class Newer(msgspec.Struct, frozen=True):
    """A Struct that an older version of the code had without `copies` and `to`."""

    name: str
    to: str
    copies: int = 1


def status_of(job_id: int | None) -> str:
    """Return a job's status, "gone" when it is done and has left."""
    row = jobs.get(job_id or 0)
    return row.status if row else "gone"


def run_sql(statement: str, *values: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


# -- retries ------------------------------------------------------------------


def test_pauses_between_attempts_double_and_the_last_failure_keeps_the_job(worker):
    starts: list[float] = []

    @job(Task, topic="t.Fail", attempts=5, backoff=0.5)
    def fail(request: Task) -> None:
        starts.append(time.monotonic())
        raise ConnectionRefusedError("nobody listens")

    worker(topics=["t.Fail"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: status_of(job_id) == "failed", because="all attempts failed", within=30)

    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert len(pauses) == 4
    # A poll's second may pass before an idle worker looks again, and half a second more.
    for pause, promised in zip(pauses, [0.5, 1, 2, 4], strict=True):
        assert promised <= pause < promised + 1.5, pauses
    row = Job.objects.get(pk=job_id)
    assert (row.attempts, row.error) == (5, "ConnectionRefusedError: nobody listens")
    assert row.traceback.startswith("Traceback (most recent call last):")
    assert 'raise ConnectionRefusedError("nobody listens")' in row.traceback
    assert (row.worker, row.lease_until, row.due < ago(0)) == ("", None, True)

    time.sleep(1.5)
    assert len(starts) == 5


def test_a_failed_job_that_the_operator_resets_in_sql_starts_at_once_with_all_its_attempts(worker):
    seen: list[tuple[int, int]] = []
    mended = False

    @job(Task, topic="t.Mend", attempts=2, backoff=0.05)
    def mend(request: Task, run: Run) -> None:
        seen.append((run.attempt, run.max_attempts))
        if not mended:
            raise LookupError("not yet")

    worker(topics=["t.Mend"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: status_of(job_id) == "failed", because="both attempts failed")

    run_sql("update myxo_jobs set failed = false, attempts = 0 where id = %s", job_id)
    wait_until(lambda: len(seen) == 4, because="it has both attempts again", within=5)
    wait_until(lambda: status_of(job_id) == "failed", because="both failed again")

    mended = True
    began = time.monotonic()
    run_sql("update myxo_jobs set failed = false, attempts = 0 where id = %s", job_id)
    wait_until(lambda: status_of(job_id) == "gone", because="it succeeds", within=5)
    assert time.monotonic() - began < 3.0
    assert seen == [(1, 2), (2, 2), (1, 2), (2, 2), (1, 2)]


def test_a_failed_job_that_is_retried_starts_at_once_with_all_its_attempts(worker):
    seen: list[int] = []

    @job(Task, topic="t.Retry")
    def retry(request: Task, run: Run) -> None:
        seen.append(run.attempt)

    row = make_job("t.Retry", status="failed")
    worker(topics=["t.Retry"])
    assert jobs.retry(row.pk)

    wait_until(lambda: status_of(row.pk) == "gone", because="it succeeds", within=5)
    assert seen == [1]


# -- whatever is raised -------------------------------------------------------


def raise_exit() -> None:
    sys.exit(3)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_cancelled() -> None:
    raise asyncio.CancelledError


def raise_generator_exit() -> None:
    raise GeneratorExit


def raise_megabytes() -> None:
    raise ValueError("x" * 5_000_000)


def raise_from_deep_recursion() -> None:
    raise_from_deep_recursion()


def raise_a_thousand() -> None:
    raise ExceptionGroup("many", [ValueError(f"number {n}") for n in range(1_000)])


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raise_wordless() -> None:
    raise WordlessError


def raise_what_no_database_stores() -> None:
    raise ValueError("zero \x00 and lone \ud800")


RAISED = {
    "SystemExit": raise_exit,
    "KeyboardInterrupt": raise_interrupt,
    "CancelledError": raise_cancelled,
    "GeneratorExit": raise_generator_exit,
    "ValueError: xxx": raise_megabytes,
    "RecursionError": raise_from_deep_recursion,
    "ExceptionGroup: many": raise_a_thousand,
    "WordlessError": raise_wordless,
    "ValueError: zero": raise_what_no_database_stores,
}


def assert_each_is_a_counted_failure(worker: Callable[..., object], topic: str) -> None:
    running = worker(topics=[topic])
    ids = {error: jobs.put(Task(error)) for error in RAISED}
    for error, job_id in ids.items():
        wait_until(lambda: status_of(job_id) == "failed", because=f"{error} fails it", within=15)  # noqa: B023
        row = Job.objects.get(pk=job_id)
        assert row.attempts == 2
        assert error in row.error
        assert len(row.error) <= 2_000
        assert 0 < len(row.traceback.encode()) <= 16 * 1024

    well = jobs.put(Task("well"))
    wait_until(lambda: status_of(well) == "gone", because="the worker is fine", within=5)
    running.stop()


def test_whatever_a_handler_raises_is_a_counted_failure_and_the_worker_is_fine(worker):
    @job(Task, topic="t.Raise", attempts=2, backoff=0)
    def raise_(request: Task) -> None:
        if request.name in RAISED:
            RAISED[request.name]()

    assert_each_is_a_counted_failure(worker, "t.Raise")


def test_whatever_an_async_handler_raises_is_a_counted_failure_and_the_worker_is_fine(worker):
    @job(Task, topic="t.Raise", attempts=2, backoff=0)
    async def raise_(request: Task) -> None:
        if request.name in RAISED:
            RAISED[request.name]()

    assert_each_is_a_counted_failure(worker, "t.Raise")


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_an_async_handler_behind_a_plain_decorator_is_a_recorded_failure_that_says_what_to_do(
    worker, atomic
):
    async def handle(request: Task) -> None:
        raise AssertionError("nobody awaits this")

    @functools.wraps(handle)
    def wrapper(request: Task) -> object:
        return handle(request)

    job(Task, topic="t.Wrapped", attempts=2, backoff=0, atomic=atomic)(wrapper)
    worker(topics=["t.Wrapped"])
    job_id = jobs.put(Task("not awaited"))
    wait_until(lambda: status_of(job_id) == "failed", because="it fails", within=5)

    row = Job.objects.get(pk=job_id)
    assert row.attempts == 2
    assert row.error.startswith("TypeError: ")
    assert "make the decorator's wrapper async" in row.error


# -- payloads of another version ----------------------------------------------


def test_rows_of_another_version_run_where_they_fit_and_fail_at_once_where_they_do_not(worker):
    seen: list[Newer] = []

    @job(Newer, topic="t.Newer")
    def handle(request: Newer) -> None:
        seen.append(request)

    added = make_job("t.Newer", payload='{"name": "a", "to": "b"}')
    removed = make_job("t.Newer", payload='{"name": "c", "to": "d", "colour": "red", "copies": 2}')
    required = make_job("t.Newer", payload='{"name": "e"}')
    worker(topics=["t.Newer"])

    wait_until(lambda: status_of(required.pk) == "failed", because="the misfit fails", within=5)
    wait_until(lambda: status_of(added.pk) == status_of(removed.pk) == "gone", because="they fit")
    assert seen == [Newer("a", "b", 1), Newer("c", "d", 2)]
    row = Job.objects.get(pk=required.pk)
    assert row.attempts == 1
    assert row.error.startswith("PayloadInvalid:")
    assert "to" in row.error

    run_sql(
        "update myxo_jobs set payload = %s, failed = false, attempts = 0 where id = %s",
        '{"name": "e", "to": "f"}',
        required.pk,
    )
    wait_until(lambda: status_of(required.pk) == "gone", because="the mended job runs", within=5)
    assert seen[-1] == Newer("e", "f", 1)


def test_a_payload_that_is_no_json_fails_at_once_and_the_worker_is_fine(worker):
    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        pass

    broken = make_job("t.Task", payload="not json")
    worker(topics=["t.Task"])

    wait_until(lambda: status_of(broken.pk) == "failed", because="it fails", within=5)
    assert Job.objects.get(pk=broken.pk).attempts == 1
    well = jobs.put(Task("well"))
    wait_until(lambda: status_of(well) == "gone", because="the worker is fine", within=5)


# -- topics without a handler -------------------------------------------------


def test_rows_of_a_topic_without_a_handler_stay_untouched_until_a_worker_has_it(worker, caplog):
    seen: list[str] = []

    @job(Task, topic="t.Known")
    def known(request: Task) -> None:
        seen.append(request.name)

    row = make_job("t.Unknown", payload='{"name": "patient"}')
    before = Job.objects.filter(pk=row.pk).values().get()
    running = worker(topics=["t.Known"])
    with caplog.at_level(logging.INFO, "myxo_jobs"):
        known_id = jobs.put(Task("known"))
        wait_until(lambda: status_of(known_id) == "gone", because="the other topic runs")
        time.sleep(1.2)
        running.stop()
    assert Job.objects.filter(pk=row.pk).values().get() == before
    assert "t.Unknown" not in caplog.text

    @job(Newer, topic="t.Unknown")
    def unknown(request: Newer) -> None:
        seen.append(request.name)

    run_sql("update myxo_jobs set payload = %s where id = %s", '{"name":"p","to":"q"}', row.pk)
    worker(topics=["t.Known", "t.Unknown"])
    wait_until(lambda: status_of(row.pk) == "gone", because="it runs at last", within=5)
    assert seen == ["known", "p"]


def test_a_topic_renamed_in_sql_is_run_by_the_handler_of_its_new_name(worker):
    seen: list[str] = []

    @job(Task, topic="t.New")
    def new(request: Task) -> None:
        seen.append(request.name)

    row = make_job("t.Old", payload='{"name": "renamed"}')
    worker(topics=["t.New"])
    run_sql("update myxo_jobs set topic = 't.New' where topic = 't.Old'")

    wait_until(lambda: status_of(row.pk) == "gone", because="it runs", within=5)
    assert seen == ["renamed"]


# -- what is logged -----------------------------------------------------------


def test_each_failure_is_one_record_with_the_job_as_attributes_and_never_the_payload(
    worker, caplog
):
    @job(Task, topic="t.Log", attempts=2, backoff=0)
    def log(request: Task) -> None:
        raise ValueError("cannot be done")

    with caplog.at_level(logging.DEBUG, "myxo_jobs"):
        running = worker(topics=["t.Log"])
        job_id = jobs.put(Task("a secret"))
        wait_until(lambda: status_of(job_id) == "failed", because="both attempts failed")
        running.stop()

    failures = [record for record in caplog.records if "failed" in record.getMessage()]
    assert [record.levelname for record in failures] == ["WARNING", "ERROR"]
    for attempt, record in enumerate(failures, 1):
        assert record.getMessage().startswith(f"job={job_id} topic=t.Log attempt={attempt} failed")
        said = vars(record)
        assert (said["job"], said["topic"], said["attempt"]) == (job_id, "t.Log", attempt)
    assert "next_in=0.0s" in failures[0].getMessage()
    assert failures[0].exc_info is None
    assert failures[1].exc_info is not None
    assert isinstance(failures[1].exc_info[1], ValueError)
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert "a secret" not in caplog.text
    events = [(r.levelname, r.getMessage().split()[-1]) for r in caplog.records]
    for event in [("DEBUG", "put"), ("DEBUG", "claimed")]:
        assert event in events
    levels = {r.levelname for r in caplog.records if r.getMessage().startswith("worker=")}
    assert levels == {"INFO"}


def test_a_message_of_several_lines_is_one_line_of_the_log(worker, caplog):
    forged = "2026-11-29 12:00:00,000 INFO job=1 topic=t.Log attempt=1 done"
    ends = ["\n", "\r", "\x85", "\u2028"]
    forging = type(f"Forged\n{forged}", (Exception,), {})

    @job(Task, topic="t.Log", attempts=2, backoff=0)
    def log(request: Task) -> None:
        if request.name == "name":
            raise forging
        raise ValueError(f"no{ends[int(request.name)]}{forged}")

    with caplog.at_level(logging.DEBUG, "myxo_jobs"):
        running = worker(topics=["t.Log"])
        jobs.put_many([*(Task(str(place)) for place in range(len(ends))), Task("name")])
        wait_until(lambda: Job.objects.filter(failed=True).count() == 5, because="all failed")
        running.stop()

    messages = [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if "failed for good" in message]) == 5
    assert [message for message in messages if len(message.splitlines()) > 1] == []
    assert [message for message in messages if forged in message] == []
