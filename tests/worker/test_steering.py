"""What a handler may raise or ask of its run to say how the job goes on."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from itertools import pairwise

import msgspec
import pytest
from django.utils import timezone

from myxo_jobs import GiveUp, Jobs, Retry, Run, Snooze, job
from myxo_jobs.models import Job
from tests.rig import ago, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str


def row_of(job_id: int | None) -> Job:
    return Job.objects.get(pk=job_id)


def is_gone(job_id: int | None) -> bool:
    return not Job.objects.filter(pk=job_id).exists()


def test_snooze_runs_the_job_again_after_its_delay_and_uses_no_attempt(worker):
    runs: list[tuple[int, float]] = []

    @job(Task, topic="t.Nap", attempts=1)
    def nap(request: Task, run: Run) -> None:
        runs.append((run.attempt, time.monotonic()))
        if len(runs) < 4:
            raise Snooze(0.3)

    worker(topics=["t.Nap"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: is_gone(job_id), because="it is done after three naps")

    assert [attempt for attempt, _ in runs] == [1, 1, 1, 1]
    moments = [at for _, at in runs]
    assert all(b - a >= 0.3 for a, b in pairwise(moments))


def test_a_snoozed_job_waits_with_its_new_due_and_no_error(worker):
    @job(Task, topic="t.Nap")
    def nap(request: Task) -> None:
        raise Snooze(timedelta(hours=1))

    worker(topics=["t.Nap"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: row_of(job_id).due > ago(-3000), because="it was snoozed")

    row = row_of(job_id)
    assert (row.status, row.attempts, row.error) == ("pending", 0, "")
    assert timedelta(minutes=59) < row.due - timezone.now() <= timedelta(hours=1)


def test_retry_counts_the_attempt_and_waits_its_own_delay(worker):
    @job(Task, topic="t.Again", backoff=0)
    def again(request: Task) -> None:
        raise Retry(delay=3600)

    worker(topics=["t.Again"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: row_of(job_id).due > ago(-3000), because="it waits for its next attempt")

    row = row_of(job_id)
    assert (row.status, row.attempts) == ("pending", 1)
    assert timedelta(minutes=59) < row.due - timezone.now() <= timedelta(hours=1)


def test_retry_without_a_delay_waits_the_backoff(worker):
    @job(Task, topic="t.Again", backoff=3600)
    def again(request: Task) -> None:
        raise Retry

    worker(topics=["t.Again"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: row_of(job_id).due > ago(-3000), because="it waits for its next attempt")
    assert timedelta(minutes=59) < row_of(job_id).due - timezone.now() <= timedelta(hours=1)


def test_retry_on_the_last_attempt_fails_the_job(worker):
    starts: list[int] = []

    @job(Task, topic="t.Again", attempts=2)
    def again(request: Task, run: Run) -> None:
        starts.append(run.attempt)
        try:
            raise LookupError("no such page")
        except LookupError as error:
            raise Retry(delay=0) from error

    worker(topics=["t.Again"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: row_of(job_id).failed, because="its attempts are used")

    assert starts == [1, 2]
    assert (row_of(job_id).attempts, row_of(job_id).error) == (2, "LookupError: no such page")


def test_give_up_fails_the_job_now_with_its_reason(worker):
    starts: list[int] = []

    @job(Task, topic="t.Hopeless")
    def hopeless(request: Task, run: Run) -> None:
        starts.append(run.attempt)
        raise GiveUp("the customer has left")

    worker(topics=["t.Hopeless"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: row_of(job_id).failed, because="it gave up")

    assert starts == [1]
    assert (row_of(job_id).attempts, row_of(job_id).error) == (1, "GiveUp: the customer has left")


def test_a_run_tells_what_its_job_is(worker):
    told: list[tuple[object, ...]] = []

    @job(Task, topic="t.Tell", attempts=7)
    def tell(request: Task, run: Run) -> None:
        created: datetime = run.created_at
        told.append((run.id, run.topic, run.key, run.attempt, run.max_attempts, created, run.uid))
        run.progress(1, 2, "half")
        assert list(run.track([1, 2])) == [1, 2]
        assert (run.should_stop, run.cancelled) == (False, False)

    job_id = jobs.put(Task("a"), key="tell:a")
    created_at = row_of(job_id).created_at
    worker(topics=["t.Tell"])
    wait_until(lambda: is_gone(job_id), because="it is done")

    assert told == [(job_id, "t.Tell", "tell:a", 1, 7, created_at, None)]


def test_extend_makes_the_claim_last_and_renewals_do_not_shorten_it(worker):
    asked_at: list[datetime] = []
    done = False

    @job(Task, topic="t.Long", lease=1)
    def long(request: Task, run: Run) -> None:
        asked_at.append(timezone.now())
        run.extend(60)
        while not done:
            time.sleep(0.01)

    worker(topics=["t.Long"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: asked_at, because="it runs")
    try:
        until = asked_at[0] + timedelta(seconds=59)
        wait_until(lambda: row_of(job_id).lease_until > until, because="the claim lasts")
        deadline = time.monotonic() + 2.0  # twice the lease: renewals would have come
        while time.monotonic() < deadline:
            assert row_of(job_id).lease_until > until
            time.sleep(0.05)
    finally:
        done = True


def test_an_attempt_is_written_at_the_claim_before_the_handler_starts(worker):
    rows: list[Job] = []

    @job(Task, topic="t.Look")
    def look(request: Task, run: Run) -> None:
        rows.append(row_of(run.id))
        if run.attempt == 1:
            raise Retry(delay=0)

    worker(topics=["t.Look"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: is_gone(job_id), because="it is done")

    assert [(row.attempts, row.status) for row in rows] == [(1, "running"), (2, "running")]
    assert all(row.lease_until > row.started_at for row in rows)
    assert rows[0].worker != rows[1].worker
