"""Kept jobs whose time is over go: their cleanup first, then the row."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from django.db import OperationalError, connection, connections
from django.utils import timezone

from myxo_jobs import GiveUp, Jobs, Run, job, queue
from myxo_jobs.models import Job
from myxo_jobs.testing import run_jobs
from myxo_jobs.worker import running, sweeping
from myxo_jobs.worker.board import Board
from myxo_jobs.worker.running import Outcome
from myxo_jobs.worker.sweeping import Sweeper
from tests.rig import ago, handler_of, in_threads, make_job, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()
tokens = queue.Tokens()


class Task(msgspec.Struct, frozen=True):
    name: str


def kept(cleanup: Callable[[Any], object] | None = None, **arguments: Any) -> None:
    """Declare the handler of t.Keep."""

    @job(Task, topic="t.Keep", keep=60, cleanup=cleanup, **arguments)
    def handle(request: Task) -> None:
        if request.name == "hopeless":
            raise GiveUp


def sweeper() -> Sweeper:
    return Sweeper("default", [handler_of("t.Keep")], tokens.next)


def done(seconds_ago: float = 5, topic: str = "t.Keep", **columns: Any) -> Job:
    return make_job(topic, status="done", expires_at=ago(seconds_ago), **columns)


@pytest.mark.parametrize("cleanup", [None, lambda row: None], ids=["plain", "cleanup"])
def test_a_sweep_removes_what_has_ended_and_expired_and_nothing_else(cleanup):
    kept(cleanup)
    expired = [done() for _ in range(3)] + [
        make_job("t.Keep", status="failed", expires_at=ago(5), uid=queue.uuid7())
    ]
    stays = [
        done(-60),
        done(topic="t.Other"),
        make_job("t.Keep", status="failed"),
        make_job("t.Keep", status="running", expires_at=ago(5)),
        make_job("t.Keep", status="pending", expires_at=ago(5)),
    ]
    sweeper().sweep()
    left = set(Job.objects.values_list("pk", flat=True))
    assert left == {row.pk for row in stays}
    assert expired

    sweeper().sweep()
    assert set(Job.objects.values_list("pk", flat=True)) == left


def test_a_worker_sweeps_what_it_serves(worker):
    cleaned: list[int] = []
    kept(lambda row: cleaned.append(row.pk))
    row = done()
    worker(topics=["t.Keep"])
    wait_until(lambda: not Job.objects.exists(), because="its time is over")

    assert cleaned == [row.pk]


def test_more_than_a_slice_is_removed_by_one_sweep():
    kept()
    template = done()
    rows = [Job(topic="t.Keep", payload="{}", due=None, expires_at=ago(9)) for _ in range(2_100)]
    Job.objects.bulk_create(rows)
    sweeper().sweep()

    assert template
    assert not Job.objects.exists()


def test_a_row_whose_cleanup_fails_is_logged_stays_for_later_and_holds_up_no_other(caplog):
    calls: list[str] = []

    def cleanup(row: Job) -> None:
        calls.append(row.payload)
        if row.payload == "bad":
            raise SystemExit("the disk is gone")

    kept(cleanup)
    bad = done(60, payload="bad")
    done(5, payload="good")
    with caplog.at_level(logging.ERROR, logger="myxo_jobs"):
        sweeper().sweep()
        sweeper().sweep()

    assert sorted(calls) == ["bad", "good"]
    assert [row.pk for row in Job.objects.all()] == [bad.pk]
    assert [record.job for record in caplog.records] == [bad.pk]
    Job.objects.update(lease_until=ago(1))
    sweeper().sweep()
    assert calls.count("bad") == 2


def test_two_sweeps_at_once_clean_up_each_job_once():
    cleaned: list[int] = []
    kept(lambda row: cleaned.append(row.pk))
    rows = [done().pk for _ in range(40)]
    in_threads(sweeper().sweep, sweeper().sweep)

    assert sorted(cleaned) == rows
    assert not Job.objects.exists()


def test_a_job_whose_time_is_made_longer_during_its_cleanup_stays():
    def cleanup(row: Job) -> None:
        Job.objects.filter(pk=row.pk).update(expires_at=ago(-60))

    kept(cleanup)
    row = done()
    sweeper().sweep()

    assert Job.objects.get().pk == row.pk


def test_a_discarded_job_that_was_done_is_cleaned_up_first():
    cleaned: list[int] = []
    kept(lambda row: cleaned.append(row.pk))
    row, waits = done(-60), make_job("t.Keep")

    assert jobs.discard(row.pk)
    assert jobs.discard(waits.pk)
    assert cleaned == [row.pk]


# -- after a failure -------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_cleanup_is_called_once_when_a_job_has_failed_for_good(worker, is_async):
    cleaned: list[tuple[int, str, bool]] = []
    runs: list[int] = []

    def cleanup(row: Job) -> None:
        cleaned.append((row.pk, row.status, timezone.get_current_timezone_name() != ""))

    def handle(request: Task, run: Run) -> None:
        runs.append(run.attempt)
        raise ValueError("no")

    async def handle_async(request: Task, run: Run) -> None:
        handle(request, run)

    options = {"topic": "t.Fail", "attempts": 2, "backoff": 0, "cleanup": cleanup}
    job(Task, **options)(handle_async if is_async else handle)
    worker(topics=["t.Fail"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: jobs.get(job_id).failed, because="its attempts are used")

    assert runs == [1, 2]
    assert cleaned == [(job_id, "running", True)]


def test_a_cleanup_that_raises_does_not_hold_up_the_failure(worker):
    def cleanup(row: Job) -> None:
        raise KeyboardInterrupt

    kept(cleanup)
    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("hopeless"))

    wait_until(lambda: jobs.get(job_id).failed, because="it gave up")


def test_a_failure_is_cleaned_up_whatever_the_handler_left_of_its_connection(worker):
    cleaned: list[int] = []

    @job(Task, topic="t.Fail", attempts=1, cleanup=lambda row: cleaned.append(row.pk))
    def handle(request: Task) -> None:
        connection.set_autocommit(False)
        connection.cursor().execute("SELECT no_such_column")

    worker(topics=["t.Fail"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: jobs.get(job_id).failed, because="it has failed for good")

    assert cleaned == [job_id]


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_failure_is_cleaned_up_once_the_database_answers(worker, monkeypatch, is_async):
    cleaned: list[int] = []
    tries: list[int] = []

    def read_the_row(outcome: Outcome, alias: str) -> None:
        tries.append(outcome.claim.job_id)
        if len(tries) < 3:
            raise OperationalError("it is away")
        see_off(outcome, alias)

    see_off = running.see_off
    monkeypatch.setattr(running, "see_off", read_the_row)
    options = {"topic": "t.Fail", "attempts": 1, "cleanup": lambda row: cleaned.append(row.pk)}
    if is_async:

        @job(Task, **options)
        async def handle(request: Task) -> None:
            raise ValueError
    else:

        @job(Task, **options)
        def handle(request: Task) -> None:
            raise ValueError

    worker(topics=["t.Fail"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: jobs.get(job_id).failed, because="it has failed for good")

    assert (cleaned, tries) == ([job_id], [job_id] * 3)


def test_run_jobs_calls_the_cleanup_of_a_failed_job():
    cleaned: list[int] = []
    kept(lambda row: cleaned.append(row.pk))
    job_id = jobs.put(Task("hopeless"))
    run_jobs()

    assert cleaned == [job_id]


def test_the_job_of_a_worker_that_died_in_its_last_attempt_is_cleaned_up(runjobs, ledger):
    from tests.worker.jobs import Vanishing

    worker = runjobs("--topics", "worker.Vanishing", "--processes", "1")
    job_id = jobs.put(Vanishing("a"))
    wait_until(lambda: jobs.get(job_id).failed, because="it killed its worker twice", within=30)
    worker.send(signal.SIGTERM)
    worker.wait()

    assert ledger.count("begin", name="a") == 2
    assert ledger.count("cleanup", name="a") == 1
    row = jobs.get(job_id)
    assert row.reason == "lost"
    assert row.error == "WorkerLost: its worker process was killed by signal SIGKILL"
    assert [one["exception"] for one in msgspec.json.decode(row.attempt_log)] == [
        "myxo_jobs.errors.WorkerLost"
    ] * 2


def charge(claim: queue.Claim) -> None:
    """Record that the timeout of a run could not end it, as the supervisor does."""
    board = Board()
    board.introduce(claim.token.rpartition(".")[0])
    board.add([claim])
    board.start(claim, 0.0)
    board.interrupt(claim)
    queue.charge_timeouts(connection, list(board.entries()))


def test_a_run_that_its_timeout_could_not_end_is_followed_after_the_backoff(claim_one):
    kept(lambda row: None, attempts=2, backoff=60)
    job_id = jobs.put(Task("a"))
    charge(claim_one("t.Keep"))

    row = jobs.get(job_id)
    assert (row.status, row.attempts) == ("pending", 1)
    assert row.error.startswith("JobTimeout: ")
    assert 55 < (row.due - timezone.now()).total_seconds() < 61


def test_a_last_run_that_its_timeout_could_not_end_is_cleaned_up_by_a_worker(claim_one, worker):
    cleaned: list[int] = []
    kept(lambda row: cleaned.append(row.pk), attempts=1)
    job_id = jobs.put(Task("a"))
    charge(claim_one("t.Keep"))
    worker(topics=["t.Keep"])
    wait_until(lambda: jobs.get(job_id).failed, because="it has no attempt left")

    row = jobs.get(job_id)
    assert (cleaned, row.reason, row.attempts) == ([job_id], "timeout", 1)
    assert row.error.startswith("JobTimeout: it took longer than its timeout, and could not")


def test_a_sweep_leaves_no_connection_open_and_survives_whatever_it_meets(monkeypatch, caplog):
    kept()
    seen: list[object] = []
    faults = iter([OSError("no descriptor is left"), OperationalError("gone"), None])
    monkeypatch.setattr(sweeping, "SWEEP_SECONDS", 0.05)
    one = sweeper()
    sweep = one.sweep

    def broken() -> None:
        seen.append(connections["default"].connection)
        fault = next(faults, None)
        sweep()
        if fault is not None:
            raise fault

    monkeypatch.setattr(one, "sweep", broken)
    expired = [done()]
    with caplog.at_level(logging.ERROR, logger="myxo_jobs"):
        one.start()
        wait_until(lambda: len(seen) >= 4, because="it sweeps on")
        expired.append(done())
        wait_until(lambda: not Job.objects.exists(), because="it removes what has expired")
        one.stop(10)

    assert set(seen) == {None}
    assert ["sweep failed" in record.getMessage() for record in caplog.records] == [True]
