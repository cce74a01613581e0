"""A kept job tells how far it is, into its row, and is not held up by that."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from django.db import connection, transaction

from myxo_jobs import Jobs, Run, job, queue
from myxo_jobs.models import Job
from tests.app.models import Note
from tests.rig import ended, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str


def progress_of(job_id: int | None) -> tuple[float | None, float | None, str | None]:
    row = Job.objects.get(pk=job_id)
    return row.progress_done, row.progress_total, row.progress_note


def test_progress_is_seen_in_the_row_while_the_job_runs_and_the_last_with_its_end(worker):
    go_on = threading.Event()

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        time.sleep(0.01)  # later than its start also where moments are milliseconds
        run.progress(3, 10, "Writing notes")
        go_on.wait(10)
        run.progress(10, 10)

    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: progress_of(job_id)[0], because="it is written", within=2)
    row = Job.objects.get(pk=job_id)
    assert progress_of(job_id) == (3, 10, "Writing notes")
    assert row.status == "running"
    assert row.updated_at > row.started_at
    go_on.set()

    ended(job_id)
    assert progress_of(job_id) == (10, 10, "")


def test_each_attempt_starts_empty(worker):
    seen: list[Any] = []

    @job(Task, topic="t.Keep", keep=60, attempts=2, backoff=0)
    def handle(request: Task, run: Run) -> None:
        seen.append(progress_of(run.id))
        if run.attempt == 1:
            run.progress(3, 10, "first")
            wait_until(lambda: progress_of(run.id)[0], because="it is written")
            raise ValueError
        run.progress(1)
        raise ValueError

    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"))

    assert ended(job_id).failed
    assert seen == [(None, None, None)] * 2
    assert progress_of(job_id) == (1, None, "")


def test_a_million_calls_cost_under_a_microsecond_each_and_two_writes_a_second(worker, monkeypatch):
    took: list[float] = []
    writes: list[float] = []
    write = queue.note_progress

    def counted(*arguments: Any) -> set[int]:
        writes.append(time.monotonic())
        return write(*arguments)

    monkeypatch.setattr(queue, "note_progress", counted)

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        began = time.thread_time()
        for done in range(1_000_000):
            run.progress(done, 1_000_000)
        took.append(time.thread_time() - began)

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a")))

    assert row.progress_done == 999_999
    assert took[0] < 1.0
    assert all(b - a >= 0.49 for a, b in pairwise(writes))


def test_progress_neither_raises_nor_waits_beside_an_open_write_transaction(worker):
    took: list[float] = []

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        with transaction.atomic():
            Note.objects.create(text="held")
            began = time.monotonic()
            while time.monotonic() - began < 3:
                before = time.monotonic()
                run.progress(1, 2)
                took.append(time.monotonic() - before)
                time.sleep(0.01)

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a")))

    assert (row.status, row.attempts, row.progress_done) == ("done", 1, 1)
    assert max(took) < 0.2


def test_track_counts_and_takes_the_total_from_where_there_is_one(worker):
    seen: list[Any] = []
    for number in range(3):
        Note.objects.create(text=str(number))

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        notes = run._notes
        for items in (Note.objects.all(), [1, 2, 3], {1, 2, 3}, "abc", iter([1, 2, 3])):
            assert len(list(run.track(items))) == 3
            seen.append(notes.newest)
        list(run.track(iter([1, 2, 3]), total=4))
        seen.append(notes.newest)
        seen.extend([notes.newest for number in run.track([1, 2, 3]) if number == 3])

    worker(topics=["t.Keep"])

    assert ended(jobs.put(Task("a"))).status == "done"
    assert seen == [(3, 3, "")] * 4 + [(3, None, ""), (3, 4, ""), (2, 3, "")]


@pytest.mark.parametrize(
    "values",
    [(-1,), (float("nan"),), (float("inf"),), (1, -1), (1, float("nan")), (10**400,)],
    ids=repr,
)
def test_a_number_that_is_no_progress_is_a_value_error(worker, values):
    @job(Task, topic="t.Keep", keep=60, attempts=1)
    def handle(request: Task, run: Run) -> None:
        run.progress(*values)

    worker(topics=["t.Keep"])
    assert ended(jobs.put(Task("a"))).error.startswith("ValueError: progress takes numbers from 0")


def test_a_long_note_is_cut_and_any_text_is_stored(worker):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task, run: Run) -> None:
        run.progress(1, note="a\x00\ud800" + "x" * 300)

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a")))

    assert row.progress_note == "a�?" + "x" * 252


def test_a_lost_claim_writes_no_progress(make_job, claim_one, wind_back):
    row = make_job("t.Keep")
    first = claim_one("t.Keep")
    first.notes = queue.Notes()
    first.notes.newest = (1, 2, "late")
    wind_back(first, seconds=31)
    claim_one("t.Keep")

    assert queue.note_progress(connection, [first]) == set()
    assert progress_of(row.pk) == (None, None, None)


def test_a_plain_job_may_call_them_and_nothing_is_written(worker):
    @job(Task, topic="t.Plain", attempts=1)
    def handle(request: Task, run: Run) -> None:
        run.progress(1, 2, "x")
        assert list(run.track([1, 2])) == [1, 2]
        raise LookupError

    worker(topics=["t.Plain"])
    job_id = jobs.put(Task("a"))

    assert ended(job_id).error == "LookupError"
    assert progress_of(job_id) == (None, None, None)
