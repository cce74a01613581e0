"""One key, one row: a put does nothing while a job with its key is in the queue."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest
from django.db import connection, connections, transaction
from django.utils.safestring import mark_safe

from myxo_jobs import Jobs, queue
from myxo_jobs.models import Job
from tests.app.jobs import CountWords, Work
from tests.app.models import Note
from tests.rig import ROOT, in_threads, process_environment, wait_until

jobs = Jobs()
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("state", ["pending", "running", "expired", "failed"])
def test_a_key_that_is_in_the_queue_is_not_put_again(make_job, state, caplog):
    caplog.set_level(logging.INFO, logger="myxo_jobs")
    holder = make_job(status=state, key="one")
    before = Job.objects.values().get()

    assert jobs.put(Work("again"), key="one") is None
    assert jobs.put(CountWords(1), key="one") is None  # one key, over all topics
    assert jobs.put_many([Work("again")], key=lambda request: "one") == 0
    assert Job.objects.values().get() == before
    *lines, last = [record for record in caplog.records if record.levelname == "INFO"]
    assert len(lines) == 2
    assert last.getMessage() == "topics=notes.Work not put jobs=1: their keys are there"
    for record in lines:
        assert record.job == holder.pk
        assert f"key='one' not put: job={holder.pk} topic=notes.Work" in record.getMessage()
        assert record.getMessage().endswith(holder.status)


def test_a_done_job_frees_its_key(make_job, claim_one):
    jobs.put(Work("first"), key="one")
    queue.complete(connection, [claim_one()])
    second = jobs.put(Work("second"), key="one")

    assert second is not None
    make_job(key="two", due=None)  # a kept one that is done
    assert jobs.put(Work("after"), key="two")


def test_a_failed_job_holds_its_key_until_it_is_done_or_discarded(make_job, claim_one):
    failed = make_job(status="failed", key="one")
    assert jobs.put(Work("again"), key="one") is None
    jobs.retry(failed.pk)
    assert jobs.put(Work("again"), key="one") is None
    queue.complete(connection, [claim_one()])
    assert jobs.put(Work("again"), key="one")

    failed = make_job(status="failed", key="two")
    jobs.discard(failed.pk)
    assert jobs.put(Work("again"), key="two")


def test_jobs_without_a_key_are_never_compared():
    assert jobs.put(Work("x"))
    assert jobs.put(Work("x"))
    assert jobs.put(Work("x"), key=None)
    assert jobs.put_many([Work("x"), Work("x")], key=lambda request: None) == 2


def test_the_first_of_a_key_wins_among_many():
    jobs.put(Work("there"), key="a")
    requests = [Work(name) for name in ("a1", "b1", "b2", "none1", "none2", "c1")]
    count = jobs.put_many(
        requests, key=lambda request: None if request.name[0] == "n" else request.name[0]
    )

    assert count == 4
    names = {job.key: job.payload for job in Job.objects.exclude(key=None)}
    assert {key: "b1" in payload for key, payload in names.items()}["b"]
    assert set(names) == {"a", "b", "c"}
    assert "there" in names["a"]


@pytest.mark.parametrize(
    "key", ["k", "x" * 255, "ü" * 255, "😀" * 255, " spaced ", "a'b\"c%s\\", "\n", "A", "a"]
)
def test_a_key_is_stored_as_it_is(key):
    assert jobs.put(Work("x"), key=key)
    assert Job.objects.get().key == key
    assert jobs.put(Work("x"), key=key.swapcase() + "y") if len(key) < 255 else True
    assert jobs.put(Work("x"), key=mark_safe(key)) is None


def test_a_key_put_twice_in_a_transaction_leaves_it_usable():
    with transaction.atomic():
        Note.objects.create(text="before")
        first = jobs.put(Work("one"), key="k")
        second = jobs.put(Work("two"), key="k")
        Note.objects.create(text="after")

    assert (first is None, second) == (False, None)
    assert Note.objects.count() == 2
    assert [job.pk for job in Job.objects.filter(key="k")] == [first]


def test_a_key_whose_put_was_rolled_back_is_free():
    with transaction.atomic():
        jobs.put(Work("undone"), key="k")
        transaction.set_rollback(True)

    assert jobs.put(Work("done"), key="k")


# -- races -----------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_a_put_waits_for_another_transaction_that_has_put_its_key(commits):
    put, go_on = threading.Event(), threading.Event()
    results: dict[str, int | None] = {}

    def first() -> None:
        with transaction.atomic():
            results["first"] = jobs.put(Work("first"), key="k")
            put.set()
            go_on.wait(10)
            transaction.set_rollback(not commits)

    def second() -> None:
        put.wait(10)
        with transaction.atomic():
            results["second"] = jobs.put(Work("second"), key="k")
            Note.objects.create(text="the transaction goes on")

    def watch() -> None:
        put.wait(10)
        connections.close_all()
        threading.Event().wait(0.3)
        assert "second" not in results, "it did not wait"
        go_on.set()

    in_threads(first, second, watch)
    assert (results["second"] is None) is commits
    assert Job.objects.get().pk == (results["first"] if commits else results["second"])
    assert Note.objects.count() == 1


def test_of_fifty_putters_at_once_one_wins_each_key():
    """No error reaches any of them, and their transactions stay usable."""

    def putter(number: int):
        def put() -> list[int | None]:
            ids = []
            for key in range(10):
                with transaction.atomic():
                    ids.append(jobs.put(Work(str(number)), key=f"key {key}"))
                    Note.objects.create(text=f"{number} {key}")
            return ids

        return put

    results = in_threads(*[putter(number) for number in range(50)], within=120)
    for key in range(10):
        winners = [ids[key] for ids in results if ids[key] is not None]
        assert winners == [Job.objects.get(key=f"key {key}").pk]
    assert Job.objects.count() == 10
    assert Note.objects.count() == 500


PUTTER = """
import sys, time, django
django.setup()
from myxo_jobs import Jobs
from tests.app.jobs import Work
jobs = Jobs()
print("ready", flush=True)
sys.stdin.readline()
wins = sum(jobs.put(Work(sys.argv[1]), key=f"key {n}") is not None for n in range(200))
many = jobs.put_many([Work(str(n)) for n in range(500)], key=lambda r: f"many {r.name}")
print(wins, many)
"""


def test_of_several_processes_one_wins_each_key():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PUTTER, str(number)],
            cwd=ROOT,
            env=process_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(process.communicate(timeout=60)[0])
        assert process.returncode == 0
    wins, many = zip(*[map(int, output.split()) for output in outputs], strict=True)

    assert sum(wins) == 200
    assert sum(many) == 500
    assert Job.objects.count() == Job.objects.values("key").distinct().count() == 700


def test_a_put_and_the_end_of_its_key_s_job_never_lose_both(claim_one):
    """While one thread finishes the job of a key, another puts it again and again."""
    jobs.put(Work("0"), key="k")
    done: list[int] = []

    def finish() -> None:
        while len(done) < 30:
            claim = wait_until(lambda: claim_one() if Job.objects.exists() else None, because="put")
            assert queue.complete(connection, [claim]) == {claim.job_id}
            done.append(claim.job_id)

    def put() -> int:
        wins = 1
        while len(done) < 30:
            wins += jobs.put(Work("again"), key="k") is not None
        return wins

    _, wins = in_threads(finish, put)
    assert len(set(done)) == 30
    assert wins == 30 + Job.objects.count()
