"""A cancelled job does not start, or stops soon; and it stays, failed as cancelled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.utils import timezone

from myxo_jobs import Cancelled, Jobs, Retry, Run, Snooze, job, queue
from myxo_jobs.handlers import registry
from myxo_jobs.models import Job
from myxo_jobs.testing import run_jobs
from tests.rig import ended, handler_of, make_job, wait_until, wind_back

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str


def outcome(row: Job) -> tuple[str, str | None, object]:
    return row.status, row.reason, row.cancelled_at


AS_CANCELLED = ("failed", "cancelled", None)


# -- one that waits ---------------------------------------------------------------


def test_a_job_that_waits_is_failed_now_as_cancelled(claim_some):
    job_id = jobs.put(Task("a"), delay=3600) if handle_nothing() else None
    assert jobs.cancel(job_id)

    row = jobs.get(job_id)
    assert outcome(row) == AS_CANCELLED
    assert (row.error, row.attempts, row.worker) == ("Cancelled", 0, "")
    assert abs(timezone.now() - row.completed_at) < timedelta(seconds=10)
    assert row.due <= timezone.now() + timedelta(seconds=1)
    assert claim_some("t.Keep") == []
    assert not jobs.cancel(job_id)

    assert jobs.retry(job_id)
    assert len(claim_some("t.Keep")) == 1


def handle_nothing(**fields: Any) -> bool:
    """Declare the handler of t.Keep, with what `@job` does not offer, too."""

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None: ...

    handler = msgspec.structs.replace(handler_of("t.Keep"), **fields)
    registry._by_topic["t.Keep"] = registry._by_request[Task] = handler
    return True


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_job_that_has_ended_is_left_as_it_is(state):
    row = make_job("t.Keep", status=state)
    before = Job.objects.values().get()

    assert not jobs.cancel(row.pk)
    assert not jobs.cancel(row.pk + 1)
    assert not jobs.cancel(2**70)
    assert Job.objects.values().get() == before


def test_a_job_that_is_cancelled_while_it_waits_ends_as_its_handler_says():
    told: list[int] = []
    cleaned: list[str] = []
    handle_nothing(
        failed_gives_up_key=True,
        failed_expires=True,
        at_outcome=lambda connection, job_id: told.append(job_id),
        cleanup=lambda row: cleaned.append(row.status),
    )
    job_id = jobs.put(Task("a"), key="one")
    jobs.cancel(job_id)

    row = jobs.get(job_id)
    assert (row.key, row.expires_at - row.completed_at) == (None, timedelta(seconds=60))
    assert (told, cleaned) == ([job_id], ["failed"])


@pytest.mark.parametrize("raised", [ValueError("a"), Snooze(60), Snooze(0)], ids=repr)
def test_a_job_whose_cancel_is_noticed_with_its_outcome_is_cleaned_up_once(worker, raised):
    cleaned: list[int] = []
    started, ends = threading.Event(), threading.Event()

    @job(Task, topic="t.Keep", keep=60, cleanup=lambda row: cleaned.append(row.pk))
    def handle(request: Task) -> None:
        started.set()
        ends.wait(30)
        raise raised

    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"))
    assert started.wait(10)
    jobs.cancel(job_id)
    ends.set()  # at once: the run has not heard of it

    assert outcome(ended(job_id)) == AS_CANCELLED
    assert cleaned == [job_id]


# -- one that runs ----------------------------------------------------------------


def test_progress_and_track_raise_cancelled_within_two_seconds(worker):
    took: list[float] = []
    started, cancelled_at = threading.Event(), []

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        started.set()
        try:
            for _ in run.track(range(2_000)):
                time.sleep(0.01)
        except Cancelled:
            took.append(time.monotonic() - cancelled_at[0])
            assert run.cancelled
            assert run.should_stop
            raise

    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"))
    started.wait(10)
    time.sleep(1)
    cancelled_at.append(time.monotonic())
    assert jobs.cancel(job_id)
    row = ended(job_id)

    assert outcome(row) == AS_CANCELLED
    assert (row.attempts, row.message) == (1, "")
    assert took[0] < 2
    assert row.error == "Cancelled"


def test_an_async_kept_job_is_cancelled_at_its_next_await_and_its_worker_goes_on(worker):
    @job(Task, topic="t.Keep", keep=60)
    async def handle(request: Task) -> str:
        await asyncio.sleep(30 if request.name == "long" else 0)
        return request.name

    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("long"))
    wait_until(lambda: jobs.get(job_id).status == "running", because="it runs")
    began = time.monotonic()
    jobs.cancel(job_id)

    assert outcome(ended(job_id)) == AS_CANCELLED
    assert time.monotonic() - began < 4
    assert ended(jobs.put(Task("next"))).result == '"next"'


@pytest.mark.parametrize(
    "raised", [ValueError("x"), Retry(0), Snooze(0), Snooze(60), None], ids=repr
)
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_however_a_cancelled_run_ends_it_is_not_tried_again(worker, raised, seen):
    starts: list[int] = []

    @job(Task, topic="t.Plain", backoff=0)
    def handle(request: Task, run: Run) -> None:
        starts.append(run.attempt)
        jobs.cancel(run.id)
        if seen:
            wait_until(lambda: run.cancelled, because="it is asked to stop")
        if raised is not None:
            raise raised

    worker(topics=["t.Plain"])
    job_id = jobs.put(Task("a"))
    if raised is None:
        wait_until(lambda: starts and not jobs.get(job_id), because="it is done all the same")
        return
    row = ended(job_id)

    assert outcome(row) == AS_CANCELLED
    assert starts == [1]
    assert row.due <= timezone.now()


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_a_cancel_is_logged_as_news_and_not_as_a_fault(worker, caplog, seen):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        jobs.cancel(run.id)
        if seen:
            wait_until(lambda: run.cancelled, because="it is asked to stop")
        raise Snooze(60)

    with caplog.at_level(logging.INFO, logger="myxo_jobs"):
        one = worker(topics=["t.Keep"])
        job_id = jobs.put(Task("a"))
        ended(job_id)
        one.stop()

    told = [record for record in caplog.records if getattr(record, "job", None) == job_id]
    assert [(record.levelname, record.exc_info) for record in told] == [("INFO", None)]
    assert told[0].getMessage() == f"job={job_id} topic=t.Keep attempt=1 cancelled error=Cancelled"


# -- one whose worker died --------------------------------------------------------


@pytest.mark.parametrize("keep", [None, 60], ids=["plain", "kept"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_cancelled_job_whose_worker_died_does_not_run_again(worker, claim_one, keep, is_async):
    runs: list[str] = []
    cleaned: list[str] = []

    def handle(request: Task, run: Run) -> None:
        runs.append(request.name)

    async def handle_async(request: Task, run: Run) -> None:
        runs.append(request.name)

    options = {"topic": "t.Keep", "keep": keep, "cleanup": lambda row: cleaned.append(row.pk)}
    job(Task, **options)(handle_async if is_async else handle)
    job_id = jobs.put(Task("a"))
    claim = claim_one("t.Keep")
    assert jobs.cancel(job_id)
    wind_back(claim, seconds=31)
    worker(topics=["t.Keep"])
    row = ended(job_id)

    assert outcome(row) == AS_CANCELLED
    assert (row.error, row.attempts) == ("Cancelled", 1)
    assert (runs, cleaned) == ([], [job_id])


@pytest.mark.parametrize("verb", ["give_back", "leave", "lost", "late"])
def test_however_a_cancelled_job_comes_back_it_does_not_run_again(worker, claim_one, verb):
    handle_nothing(function=lambda request: pytest.fail("it runs"))
    job_id = jobs.put(Task("a"))
    claim = claim_one("t.Keep")
    jobs.cancel(job_id)
    if verb == "give_back":
        queue.give_back(connection, [claim])
    elif verb == "leave":
        queue.leave(connection, [claim])
    else:
        queue.expire(connection, [queue.Failure(claim, "WorkerLost: killed", "", "")], verb)
    worker(topics=["t.Keep"])

    row = ended(job_id)
    assert (outcome(row), row.error) == (AS_CANCELLED, "Cancelled")


def test_a_last_attempt_that_dies_after_a_cancel_is_told_as_cancelled(claim_one):
    handle_nothing(attempts=1)
    job_id = jobs.put(Task("a"))
    claim = claim_one("t.Keep")
    jobs.cancel(job_id)
    queue.fail(connection, [queue.Failure(claim, "WorkerLost: killed", "", reason="lost")])

    assert outcome(jobs.get(job_id)) == AS_CANCELLED


def test_a_request_put_again_over_a_cancelled_job_runs_though_the_worker_died(worker, claim_one):
    seen: list[str] = []
    handle_nothing(function=lambda request: seen.append(request.name))
    job_id = jobs.put(Task("a"), key="one")
    claim = claim_one("t.Keep")
    jobs.cancel(job_id)
    jobs.put(Task("b"), key="one", again=True)
    wind_back(claim, seconds=31)
    worker(topics=["t.Keep"])

    assert (outcome(ended(job_id)), seen) == (("done", None, None), ["b"])


def test_run_jobs_does_not_run_a_cancelled_job_that_was_given_back(claim_one):
    handle_nothing(function=lambda request: pytest.fail("it runs"))
    job_id = jobs.put(Task("a"))
    claim = claim_one("t.Keep")
    jobs.cancel(job_id)
    queue.give_back(connection, [claim])
    run_jobs()

    assert outcome(jobs.get(job_id)) == AS_CANCELLED


# -- other ends -------------------------------------------------------------------


def test_a_job_put_again_after_it_was_cancelled_runs_again(worker):
    seen: list[str] = []

    @job(Task, topic="t.Keep", keep=60, backoff=0)
    def handle(request: Task, run: Run) -> None:
        seen.append(request.name)
        if request.name == "a":
            jobs.cancel(run.id)
            jobs.put(Task("b"), key="one", again=True)
            raise ValueError

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a"), key="one"))

    assert (outcome(row), seen) == (("done", None, None), ["a", "b"])


def test_a_drain_raises_no_cancelled(worker):
    seen: list[bool] = []
    started = threading.Event()

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        started.set()
        while not run.should_stop:
            run.progress(1)
            time.sleep(0.01)
        seen.append(run.cancelled)
        raise Snooze(0)

    one = worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"))
    started.wait(10)
    one.stop()

    row = jobs.get(job_id)
    assert (row.status, row.attempts, seen) == ("pending", 0, [False])


def test_a_quick_job_is_not_asked_about(worker, monkeypatch):
    asked: list[set[queue.Claim]] = []
    notice = queue.notice_cancelled

    def counted(connection: Any, claims: set[queue.Claim]) -> None:
        asked.append(claims)
        notice(connection, claims)

    monkeypatch.setattr(queue, "notice_cancelled", counted)

    @job(Task, topic="t.Plain", workers=2)
    def handle(request: Task) -> None: ...

    one = worker(topics=["t.Plain"])
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        jobs.put_many([Task("a")] * 20)
        time.sleep(0.02)
    wait_until(lambda: not Job.objects.exists(), because="all are done")
    one.stop()

    assert asked == []
