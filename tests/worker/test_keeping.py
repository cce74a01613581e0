"""A kept job stays when it is done, with its result, until it expires."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from myxo_jobs import GiveUp, Jobs, Run, job, queue
from myxo_jobs.databases import Row
from myxo_jobs.handlers import registry
from myxo_jobs.models import Job
from myxo_jobs.testing import run_jobs
from myxo_jobs.worker.running import Outcome
from myxo_jobs.worker.settling import STORES
from tests.rig import ended, handler_of, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str


class Point(msgspec.Struct):
    x: Any
    y: float = 0.0


def test_a_done_job_stays_with_its_result_until_it_expires(worker):
    uids: list[str | None] = []

    @job(Task, topic="t.Keep", keep=timedelta(hours=1))
    def handle(request: Task, run: Run) -> dict[str, object]:
        uids.append(run.uid)
        return {"name": request.name, "sizes": [1, 2]}

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a"), key="one"))

    assert (row.status, row.attempts, row.worker, row.lease_until) == ("done", 1, "", None)
    assert json.loads(row.result) == {"name": "a", "sizes": [1, 2]}
    assert uids == [str(row.uid)]
    assert row.uid.version == 7
    assert row.expires_at - row.completed_at == timedelta(hours=1)
    assert row.updated_at == row.completed_at
    assert abs(timezone.now() - row.completed_at) < timedelta(seconds=30)
    assert 0 <= row.duration_ms < 30_000
    assert jobs.put(Task("b"), key="one"), "a done job frees its key, also where its row is kept"


def test_an_async_kept_job_keeps_its_result(worker):
    @job(Task, topic="t.Keep", keep=60)
    async def handle(request: Task) -> str:
        return request.name

    worker(topics=["t.Keep"])
    assert ended(jobs.put(Task("a"))).result == '"a"'


def test_a_kept_job_that_returns_nothing_has_no_result(worker):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None: ...

    worker(topics=["t.Keep"])
    assert ended(jobs.put(Task("a"))).result is None


def test_an_atomic_kept_job_ends_with_its_work(worker):
    @job(Task, topic="t.Keep", keep=60, atomic=True)
    def handle(request: Task) -> str:
        jobs.put(Task("its work"), delay=3600)
        return "done"

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a")))

    assert (row.status, row.result) == ("done", '"done"')
    assert Job.objects.filter(status="pending").count() == 1


def test_an_atomic_kept_job_whose_claim_was_lost_stores_nothing(worker):
    @job(Task, topic="t.Keep", keep=60, atomic=True, lease=1)
    def handle(request: Task, run: Run) -> str:
        if run.attempt == 1:
            Job.objects.filter(pk=run.id).update(worker="", lease_until=None)
        jobs.put(Task("its work"), delay=3600)
        return f"attempt {run.attempt}"

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a")))

    assert row.result == '"attempt 2"'
    assert Job.objects.filter(status="pending").count() == 1


def test_many_kept_jobs_are_all_done_each_with_a_uid_of_its_own(worker):
    @job(Task, topic="t.Keep", keep=60, workers=4)
    def handle(request: Task) -> str:
        return request.name

    names = [str(number) for number in range(300)]
    jobs.put_many(Task(name) for name in names)
    worker(topics=["t.Keep"])
    wait_until(lambda: Job.objects.filter(status="done").count() == 300, because="all are done")

    rows = Job.objects.order_by("pk").values_list("payload", "result", "uid")
    assert [json.loads(payload)["name"] for payload, _, _ in rows] == names
    assert [json.loads(result) for _, result, _ in rows] == names
    assert len({uid for _, _, uid in rows}) == 300


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), r"at \$: "),
        ({"a": [1, {"b": object()}]}, r"at \$\['a'\]\[1\]\['b'\]: "),
        (Point(x=[Point(x=3 + 4j)]), r"at \$\.x\[0\]\.x: "),
        ({"small": "x", "large": ["y", "x" * 2**20]}, r"at \$\['large'\]\[1\]: .* its key"),
        (["\ud800"], r"at \$\[0\]: "),
    ],
    ids=["object", "inner", "struct", "large", "surrogate"],
)
def test_a_result_that_cannot_be_stored_fails_the_job_at_once_naming_the_place(worker, value, path):
    starts: list[int] = []

    @job(Task, topic="t.Keep", keep=60, backoff=0)
    def handle(request: Task, run: Run) -> object:
        starts.append(run.attempt)
        return value

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a")))

    assert (row.status, row.attempts, starts) == ("failed", 1, [1])
    assert row.error.startswith("ResultInvalid: the result ")
    with pytest.raises(AssertionError, match=path):
        raise AssertionError(row.error)


def test_what_a_plain_job_returns_is_not_looked_at(worker):
    @job(Task, topic="t.Plain")
    def handle(request: Task) -> object:
        return object()

    worker(topics=["t.Plain"])
    job_id = jobs.put(Task("a"))
    wait_until(lambda: not Job.objects.filter(pk=job_id).exists(), because="it is done and gone")


def test_a_failed_kept_job_tells_why_and_stays_until_a_person_acts(worker):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None:
        raise GiveUp("the note is empty")

    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a"), key="one"))

    assert (row.status, row.reason, row.message) == ("failed", "refused", "the note is empty")
    assert (row.expires_at, row.key) == (None, "one")
    assert row.completed_at is not None


def test_each_attempt_is_logged_with_its_worker_its_moments_and_its_error(worker):
    @job(Task, topic="t.Keep", keep=60, backoff=0)
    def handle(request: Task, run: Run) -> None:
        if run.attempt < 3:
            raise LookupError(f"nothing\x00 at {run.attempt}")

    worker(topics=["t.Keep"])
    log = json.loads(ended(jobs.put(Task("a"))).attempt_log)

    errors = [entry["exception"] for entry in log]
    assert errors == ["builtins.LookupError", "builtins.LookupError", ""]
    assert "LookupError: nothing� at 2" in log[1]["traceback"]
    assert len({entry["worker"] for entry in log}) == 3
    moments = [moment for entry in log for moment in (entry["start"], entry["end"])]
    assert moments == sorted(moments)
    assert all(len(moment) == 24 and moment.endswith("Z") for moment in moments)


def test_of_many_attempts_the_first_and_the_last_nineteen_are_logged(worker):
    @job(Task, topic="t.Fail", attempts=25, backoff=0)
    def handle(request: Task, run: Run) -> None:
        raise ValueError(f"attempt {run.attempt}")

    worker(topics=["t.Fail"])
    log = json.loads(ended(jobs.put(Task("a"))).attempt_log)

    numbers = [int(entry["traceback"].strip().rpartition(" ")[2]) for entry in log]
    assert numbers == [1, *range(7, 26)]


def test_a_new_life_begins_without_what_told_of_the_last_one(make_job, claim_one):
    uid = UUID("019a0000-0000-7000-8000-000000000001")
    before = {"uid": uid, "progress_done": 3.0, "progress_note": "x", "result": "1"}
    row = make_job("t.Keep", status="failed", **before, expires_at=timezone.now())
    assert jobs.retry(row.pk)
    handler = handler_of("t.Keep", keep=60.0)
    (claim,) = queue.claim(connection, handler, 1, token="t.1")

    row.refresh_from_db()
    assert (claim.uid, row.uid) == (str(uid), uid)
    emptied = (row.completed_at, row.duration_ms, row.result, row.expires_at, row.reason)
    assert emptied == (None,) * 5
    assert (row.message, row.progress_done, row.progress_note) == (None, None, None)
    assert row.updated_at == row.started_at


def test_a_kept_job_that_was_put_again_waits_with_its_newest_request(worker):
    seen: list[str] = []

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> str:
        seen.append(request.name)
        if request.name == "a":
            jobs.put(Task("b"), key="one", again=True)
        return request.name

    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"), key="one")

    assert ended(job_id).result == '"b"'
    assert (seen, jobs.get(job_id).attempts) == (["a", "b"], 1)


# -- what services ask for ----------------------------------------------------------


def test_a_handler_can_let_failed_jobs_give_up_their_key_and_expire(worker):
    @job(Task, topic="t.Keep", keep=60, attempts=1)
    def handle(request: Task) -> None:
        raise ValueError

    change(failed_gives_up_key=True, failed_expires=True)
    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a"), key="one"))

    assert (row.status, row.key) == ("failed", None)
    assert row.expires_at - row.completed_at == timedelta(seconds=60)


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_of_the_handler_is_called_in_the_transaction_of_the_outcome(worker, fails):
    @job(Task, topic="t.Keep", keep=60, attempts=1)
    def handle(request: Task) -> None:
        if fails:
            raise ValueError

    def put_another(connection: Any, job_id: int) -> None:
        row = queue.Row("t.Other", f'{{"name":"{job_id}"}}', None, 0)
        queue.database_of(connection).insert(connection, row, None)
        calls.append(job_id)
        if len(calls) == 1:
            connection.cursor().execute("SELECT no_such_column FROM myxo_jobs")

    calls: list[int] = []
    change(at_outcome=put_another)
    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"))

    assert ended(job_id).status == ("failed" if fails else "done")
    # The first call failed, and took what it had put and the outcome with it.
    assert calls == [job_id, job_id]
    assert Job.objects.filter(topic="t.Other").count() == 1


@pytest.mark.parametrize("ends", ["done", "failed", "cancelled", "by run_jobs"])
def test_a_job_that_a_handler_asks_for_is_put_with_the_outcome_and_wakes_its_worker(worker, ends):
    ran: list[str] = []

    @job(Task, topic="t.Keep", keep=60, attempts=1)
    def handle(request: Task) -> None:
        if ends == "failed":
            raise ValueError

    class Follow(msgspec.Struct, frozen=True):
        job_id: int

    @job(Follow, topic="t.Follow")
    def follow(request: Follow) -> None:
        ran.append(jobs.get(request.job_id).status)

    def follow_up(connection: Any, job_id: int) -> Row:
        return Row("t.Follow", f'{{"job_id":{job_id}}}', None, 0)

    change(at_outcome=follow_up)
    if ends == "cancelled":
        jobs.cancel(jobs.put(Task("a")))
    if ends == "by run_jobs":
        jobs.put(Task("a"))
        assert run_jobs() == 2
    else:
        worker(topics=["t.Keep", "t.Follow"], poll=60)
        if ends != "cancelled":
            jobs.put(Task("a"))
    wait_until(lambda: ran, because="the outcome stands, and what follows it runs")

    assert ran == ["done" if ends in ("done", "by run_jobs") else "failed"]


NOTHING: Any = None


def test_a_follow_up_that_the_database_refuses_leaves_no_outcome(claim_one):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None: ...

    change(at_outcome=lambda connection, job_id: Row("t.Follow", NOTHING, None, 0))
    job_id = jobs.put(Task("a"))
    outcome = Outcome(claim_one("t.Keep"), "keep", result="null")
    with pytest.raises(DatabaseError):
        STORES["keep"](connection, [outcome])

    assert jobs.get(job_id).status == "running"


@pytest.mark.parametrize(
    ("name", "message"),
    [("ValueError", "a told of ValueError"), ("GiveUp", "no such note"), ("fault", "")],
)
def test_the_owner_is_told_what_the_handler_explains(worker, name, message):
    @job(Task, topic="t.Keep", keep=60, attempts=2, backoff=0)
    def handle(request: Task) -> None:
        raise GiveUp("no such note") if name == "GiveUp" else ValueError("secret")

    def explain(row: Job, error: BaseException) -> str:
        if name == "fault":
            raise SystemExit
        explained.append(row.pk)
        return f"{msgspec.json.decode(row.payload)['name']} told of {type(error).__name__}"

    explained: list[int] = []
    change(explain=explain)
    worker(topics=["t.Keep"])
    row = ended(jobs.put(Task("a")))

    assert (row.status, row.message) == ("failed", message)
    assert len(explained) <= 1


def change(**fields: Any) -> None:
    """Give the handler of t.Keep what `@job` does not offer."""
    handler = msgspec.structs.replace(handler_of("t.Keep"), **fields)
    registry._by_topic["t.Keep"] = registry._by_request[Task] = handler


# -- in a test suite ------------------------------------------------------------------


def test_run_jobs_keeps_kept_jobs():
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> str:
        return request.name

    with transaction.atomic():
        job_id = jobs.put(Task("a"))
        assert run_jobs() == 1
        row = jobs.get(job_id)
        assert (row.status, row.result, run_jobs()) == ("done", '"a"', 0)
