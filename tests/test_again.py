"""A put with again=True: the newest request of a key is run, and none is lost."""

from __future__ import annotations

import os
import signal
import threading
import time

import msgspec
import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction

from myxo_jobs import Jobs, job, queue
from myxo_jobs.models import Job
from myxo_jobs.queue import Failure
from tests.app.jobs import Work
from tests.ledger import Ledger
from tests.rig import claim_one, in_threads, make_job, wait_until, wind_back
from tests.worker.jobs import Hang, Steady, Tiny

jobs = Jobs()


class Other(msgspec.Struct, frozen=True):
    name: str


def put(name: str, **options: object) -> int | None:
    return jobs.put(Work(name), key="k", again=True, **options)  # type: ignore[arg-type]


def names() -> list[str]:
    return [
        msgspec.json.decode(payload)["name"]
        for payload in Job.objects.values_list("payload", flat=True)
    ]


def test_a_put_again_of_a_new_key_is_a_put(db):
    assert put("first") == Job.objects.get().pk


def test_a_waiting_job_takes_the_newest_request_and_keeps_its_place(db):
    first = jobs.put(Work("old"), key="k", delay=60, priority=7)
    before = Job.objects.get()

    assert put("new", delay=0, priority=-3) == first

    after = Job.objects.get()
    assert (after.due, after.priority, after.again) == (before.due, 7, None)
    assert names() == ["new"]


def test_a_running_job_is_followed_by_one_run_with_the_newest_request(transactional_db):
    put("running")
    claim = claim_one()
    assert put("newer") == claim.job_id
    assert put("newest") == claim.job_id
    assert names() == ["running"]

    assert queue.complete(connection, [claim]) == set()
    assert queue.restart(connection, [claim]) == {claim.job_id}

    row = Job.objects.get()
    assert (row.status, row.attempts, row.again, names()) == ("pending", 0, None, ["newest"])
    again = claim_one()
    assert (again.job_id, again.attempt) == (claim.job_id, 1)
    assert queue.complete(connection, [again]) == {claim.job_id}


ENDS = {
    "retry": lambda claim: queue.retry(connection, [Failure(claim, "E: e", "trace", pause=300.0)]),
    "fail": lambda claim: queue.fail(connection, [Failure(claim, "E: e", "trace")]),
    "fail_unrun": lambda claim: queue.fail_unrun(connection, [Failure(claim, "E: e", "trace")]),
    "snooze": lambda claim: queue.snooze(connection, [(claim, 300.0)]),
    "give_back": lambda claim: queue.give_back(connection, [claim]),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_run_ends_the_newest_request_waits_now_with_all_its_attempts(
    end, transactional_db
):
    put("running")
    due = Job.objects.get().due
    claim = claim_one()
    put("newest")

    assert ENDS[end](claim) == {claim.job_id}

    row = Job.objects.get()
    assert (row.status, row.attempts, row.error, row.again) == ("pending", 0, "", None)
    assert row.due == due
    assert names() == ["newest"]


def test_a_lost_run_is_followed_by_the_newest_request(transactional_db):
    put("lost")
    claim = claim_one(lease=30)
    put("newest")
    wind_back(claim, seconds=31)

    second = claim_one()

    assert (second.job_id, second.attempt) == (claim.job_id, 1)
    assert '"newest"' in second.payload
    assert Job.objects.get().again is None


def test_a_failed_job_keeps_its_key_and_its_request(db):
    make_job(key="k", status="failed", payload='{"name":"failed"}')

    assert put("new") is None

    assert names() == ["failed"]
    assert Job.objects.get().again is None


def test_a_job_of_another_struct_keeps_its_key_and_its_request(db):
    job(Other, topic="other.topic")(lambda_handler)
    jobs.put(Other("other"), key="k")

    assert put("new") is None

    assert names() == ["other"]


def lambda_handler(request: Other) -> None:
    """A handler that does nothing."""


def test_a_put_again_that_rolls_back_leaves_the_running_job_as_it_was(transactional_db):
    put("running")
    claim = claim_one()
    with transaction.atomic():
        put("never")
        transaction.set_rollback(True)

    assert queue.complete(connection, [claim]) == {claim.job_id}
    assert not Job.objects.exists()


def test_the_last_of_many_puts_again_is_always_run(worker):
    ran: list[int] = []

    class Number(msgspec.Struct, frozen=True):
        number: int

    @job(Number, topic="again.number", backoff=0.01, attempts=2)
    def run(request: Number) -> None:
        ran.append(request.number)
        time.sleep(0.002)
        if request.number % 3 == 0 and request.number != 200:
            raise ValueError("whatever became of the run")

    worker(topics=["again.number"], poll=0.05)
    for number in range(1, 201):
        if jobs.put(Number(number), key="k", again=True) is None:
            failed = Job.objects.get()
            assert failed.failed  # it may fail for good between two puts
            jobs.retry(failed.pk)
            assert jobs.put(Number(number), key="k", again=True) is not None

    wait_until(lambda: not Job.objects.exists(), because="every request was run")
    assert ran[-1] == 200


def test_puts_again_from_many_threads_leave_one_row(transactional_db):
    def put_some(start: int) -> int:
        for number in range(start, start + 20):
            put(str(number))
        connections.close_all()
        return threading.get_ident()

    in_threads(*(lambda start=start: put_some(start) for start in (0, 100, 200)))
    assert Job.objects.count() == 1


# -- in real workers ----------------------------------------------------------


def begins(ledger: Ledger, job_id: int | None) -> list[tuple[str, int]]:
    return [(line.name, line.attempt) for line in ledger.lines("begin") if line.job == job_id]


def test_a_failed_run_that_was_put_again_is_neither_retried_nor_left_failed(worker, caplog):
    ran: list[str] = []
    let_go = threading.Event()

    @job(Other, topic="again.other", attempts=1)
    def run(request: Other) -> None:
        ran.append(request.name)
        if request.name == "first":
            let_go.wait(20)
            raise ValueError("whatever became of the first")

    job_id = jobs.put(Other("first"), key="k", again=True)
    worker(topics=["again.other"])
    wait_until(lambda: ran, because="the first one runs")
    assert jobs.put(Other("second"), key="k", again=True) == job_id
    let_go.set()
    wait_until(lambda: not Job.objects.exists(), because="the second one is done")
    assert ran == ["first", "second"]
    assert any("error=ValueError" in message for message in caplog.messages)


def test_an_atomic_run_that_was_put_again_is_followed_by_the_newest_request(worker):
    ran: list[str] = []

    @job(Other, topic="again.other", atomic=True)
    def run(request: Other) -> None:
        ran.append(request.name)

    jobs.put(Other("first"), key="k")
    claim = claim_one("again.other")
    jobs.put(Other("second"), key="k", again=True)
    with transaction.atomic():
        queue.complete_joined(connection, claim)
    assert Job.objects.get().attempts == 0
    worker(topics=["again.other"])
    wait_until(lambda: not Job.objects.exists(), because="the second one is done")
    assert ran == ["second"]


def test_a_run_whose_process_is_killed_is_followed_by_the_newest_request(runjobs, ledger):
    process = runjobs("--topics", "worker.Steady", "--processes", "1")
    job_id = jobs.put(Steady("first", seconds=60.0), key="k", again=True)
    (begin,) = wait_until(lambda: ledger.lines("begin"), because="the first one runs")
    assert jobs.put(Steady("second"), key="k", again=True) == job_id
    os.kill(begin.pid, signal.SIGKILL)
    wait_until(lambda: not Job.objects.exists(), because="the second one is done")
    assert begins(ledger, job_id) == [("first", 1), ("second", 1)]
    assert process.exit_code is None


def test_a_run_that_timed_out_is_followed_by_the_newest_request(runjobs, ledger):
    runjobs("--topics", "worker.Hang", "--grace", "0.5")
    job_id = jobs.put(Hang("sleep"), key="k", again=True)
    wait_until(lambda: ledger.lines("begin"), because="the first one runs")
    assert jobs.put(Hang("loop", runs=0), key="k", again=True) == job_id
    wait_until(lambda: not Job.objects.exists(), because="the second one is done", within=15)
    assert begins(ledger, job_id) == [("sleep", 1), ("loop", 1)]


def test_no_put_again_beside_a_busy_worker_is_lost(runjobs, ledger):
    """Each run sees everything that was put before it began."""
    runjobs("--topics", "worker.Tiny", "--processes", "2")
    put_at: list[float] = []
    for number in range(300):
        put_at.append(time.monotonic())
        assert jobs.put(Tiny(str(number)), key="k", again=True) is not None
    wait_until(lambda: not Job.objects.exists(), because="all is done")
    runs = ledger.lines("begin")
    assert runs[-1].name == "299"
    numbers = [int(line.name) for line in runs]
    assert numbers == sorted(set(numbers))
    assert all(line.at > put_at[int(line.name)] for line in runs)


# -- at the door --------------------------------------------------------------


def test_an_async_put_again_takes_the_newest_request(transactional_db):
    async def put_twice() -> tuple[int | None, int | None]:
        return (
            await jobs.aput(Work("old"), key="k", again=True),
            await jobs.aput(Work("new"), key="k", again=True),
        )

    first, second = async_to_sync(put_twice)()
    assert first == second is not None
    assert names() == ["new"]


def test_a_put_again_in_a_transaction_of_its_own_takes_the_newest_request(transactional_db):
    first = put("old")
    assert put("new", tx=None) == first
    assert names() == ["new"]


def test_a_put_again_without_a_key_is_a_plain_put(db):
    first = jobs.put(Work("one"), again=True)
    second = jobs.put(Work("two"), again=True)
    assert None not in (first, second)
    assert sorted(names()) == ["one", "two"]
