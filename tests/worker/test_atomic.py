"""An atomic job: what it wrote and its end commit together, or not at all."""

from __future__ import annotations

import logging

import msgspec
import pytest
from django.db import connection, transaction
from django.db.models import F

from myxo_jobs import GiveUp, Jobs, Retry, Run, Snooze, job
from myxo_jobs.models import Job
from tests.app.models import Note
from tests.rig import wait_until
from tests.worker.jobs import WriteNote

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str


def is_gone(job_id: int | None) -> bool:
    return not Job.objects.filter(pk=job_id).exists()


def test_an_atomic_job_runs_in_a_transaction_and_is_done_with_its_commit(worker):
    blocks: list[bool] = []

    @job(Task, topic="t.Write", atomic=True)
    def write(request: Task) -> None:
        blocks.append(connection.in_atomic_block)
        Note.objects.create(text=request.name)

    worker(topics=["t.Write"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: Note.objects.exists(), because="the note is committed")
    assert is_gone(job_id)  # in the same commit, so there is nothing to wait for
    assert blocks == [True]


@pytest.mark.parametrize(
    ("raised", "status", "attempts"),
    [
        (ValueError("no"), "pending", 1),
        (Retry(delay=60), "pending", 1),
        (Snooze(60), "pending", 0),
        (GiveUp("no"), "failed", 1),
        (SystemExit(), "pending", 1),
    ],
    ids=["error", "retry", "snooze", "give up", "exit"],
)
def test_what_an_atomic_job_wrote_is_rolled_back_unless_it_returns(
    worker, raised, status, attempts
):
    ran: list[bool] = []

    @job(Task, topic="t.Write", atomic=True, backoff=60)
    def write(request: Task) -> None:
        Note.objects.create(text=request.name)
        ran.append(True)
        raise raised

    worker(topics=["t.Write"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: ran, because="it ran")
    wait_until(lambda: Job.objects.get(pk=job_id).worker == "", because="its end is stored")

    row = Job.objects.get(pk=job_id)
    assert (row.status, row.attempts) == (status, attempts)
    assert not Note.objects.exists()
    assert len(ran) == 1


def test_a_put_of_an_atomic_job_commits_with_it_and_goes_with_it(worker):
    @job(Task, topic="t.Write", atomic=True, attempts=1)
    def write(request: Task) -> None:
        jobs.put(Follow(request.name))
        if request.name == "fails":
            raise ValueError("no")

    followed: list[str] = []

    @job(Follow, topic="t.Follow")
    def follow(request: Follow) -> None:
        followed.append(request.name)

    worker(topics=["t.Write", "t.Follow"])
    jobs.put_many([Task("fails"), Task("works")])
    wait_until(lambda: followed, because="the put of the good one runs")
    wait_until(lambda: Job.objects.count() == 1, because="the failed one alone stays")
    assert followed == ["works"]


class Follow(msgspec.Struct, frozen=True):
    name: str


def test_effects_of_an_atomic_job_happen_once_though_its_first_worker_is_killed(runjobs, ledger):
    job_id = jobs.put(WriteNote("once", seconds=60))
    first = runjobs("--topics", "worker.WriteNote")
    wait_until(lambda: ledger.count("begin") == 1, because="the first attempt has written")
    first.kill()
    wait_until(lambda: not Note.objects.exists(), because="its transaction is rolled back")

    runjobs("--topics", "worker.WriteNote")
    wait_until(lambda: is_gone(job_id), because="a second worker does it", within=20)
    assert [line.attempt for line in ledger.lines("begin")] == [1, 2]
    assert list(Note.objects.values_list("text", flat=True)) == ["once"]


def test_many_atomic_jobs_on_one_row_each_count_once(worker):
    note = Note.objects.create(text="counted", words=0)

    @job(Task, topic="t.Add", atomic=True, workers=3)
    def add(request: Task) -> None:
        Note.objects.filter(pk=note.pk).update(words=F("words") + 1)

    worker(topics=["t.Add"])
    jobs.put_many([Task(str(n)) for n in range(60)])
    wait_until(lambda: not Job.objects.exists(), because="all are done", within=30)
    note.refresh_from_db()
    assert note.words == 60


def test_an_on_commit_function_that_raises_leaves_an_atomic_job_done(worker, caplog):
    def raise_late() -> None:
        raise LookupError("too late to matter")

    runs: list[int] = []

    @job(Task, topic="t.Write", atomic=True)
    def write(request: Task, run: Run) -> None:
        runs.append(run.attempt)
        Note.objects.create(text=request.name)
        transaction.on_commit(raise_late)

    with caplog.at_level(logging.ERROR, "myxo_jobs"):
        running = worker(topics=["t.Write"])
        job_id = jobs.put(Task("a"))
        wait_until(lambda: is_gone(job_id), because="it is done")
        running.stop()
    assert (runs, Note.objects.count()) == ([1], 1)
    assert "too late to matter" in caplog.text
