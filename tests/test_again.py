"""A put with again=True: the newest request of a key is run, and none is lost."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
from django.db import connection, connections, transaction

from myxo_jobs import Jobs, job, queue
from myxo_jobs.models import Job
from tests.app.jobs import Work
from tests.rig import claim_one, in_threads, make_job, wait_until, wind_back

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
    "retry": lambda claim: queue.retry(connection, [(claim, 300.0, "E: e", "trace")]),
    "fail": lambda claim: queue.fail(connection, [(claim, "E: e", "trace")]),
    "fail_unrun": lambda claim: queue.fail_unrun(connection, [(claim, "E: e", "trace")]),
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
    with pytest.raises(RuntimeError), transaction.atomic():
        put("never")
        raise RuntimeError

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
