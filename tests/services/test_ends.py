"""How long a job stays, and how its life is ended sooner."""

from __future__ import annotations

import threading
import time
import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from myxo_jobs import Jobs, job, queue
from myxo_jobs.models import Job, ServiceSettings
from myxo_jobs.services import (
    JobService,
    cancel_job,
    delete_job,
    enqueue,
    get_job,
    list_jobs,
    register,
    service_stats,
    touch_job,
)
from myxo_jobs.services.rows import ServiceJob
from myxo_jobs.testing import run_jobs
from myxo_jobs.worker import sweeping
from myxo_jobs.worker.sweeping import Sweeper
from tests.rig import ago, handler_of, make_job, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()
tokens = queue.Tokens()


@pytest.fixture(autouse=True)
def export(private: Any) -> list[str]:
    """Register a service of kind `export`; return the statuses it was cleaned up in."""
    cleaned: list[str] = []

    @register
    class Export(JobService):
        kind = "export"
        retention_seconds = 3600

        def process(self, job: ServiceJob) -> None:
            while job.payload == "long":
                job.progress(1)
                time.sleep(0.01)

        def cleanup(self, job: ServiceJob) -> None:
            cleaned.append(job.status)

    return cleaned


def stored(status: str, **columns: Any) -> Job:
    return make_job("export", status=status, **{"uid": queue.uuid7(), **columns})


def uids(rows: Any) -> list[str]:
    return [str(row.uid) for row in rows]


# -- touch ---------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_touch_makes_an_ended_job_last_longer_and_never_shorter(status):
    row = stored(status, expires_at=ago(-60))
    assert touch_job(row.uid)

    touched = get_job(row.uid)
    assert timedelta(minutes=59) < touched.expires_at - timezone.now() < timedelta(minutes=61)
    assert timezone.now() - touched.last_accessed_at < timedelta(seconds=10)
    assert touch_job(str(row.uid), 30)
    assert get_job(row.uid).expires_at == touched.expires_at
    assert touch_job(row.uid, extend_seconds=timedelta(days=1))
    assert get_job(row.uid).expires_at - timezone.now() > timedelta(hours=23)


def test_a_touch_extends_by_the_dial_as_it_stands():
    ServiceSettings.objects.create(kind="export", retention_seconds=7200)
    row = stored("done", expires_at=ago(-60))
    assert touch_job(row.uid)

    assert get_job(row.uid).expires_at - timezone.now() > timedelta(minutes=119)


def test_an_expired_job_is_not_revived():
    row = stored("done", expires_at=ago(1))

    assert not touch_job(row.uid, 1000)
    assert Job.objects.get(pk=row.pk).expires_at == row.expires_at
    assert not touch_job(queue.uuid7())
    assert not touch_job("x")


@pytest.mark.parametrize("status", ["pending", "running"])
def test_a_touch_of_a_job_that_has_not_ended_is_noted_and_moves_nothing(status):
    row = stored(status, expires_at=ago(100))
    assert touch_job(row.uid)

    touched = Job.objects.get(pk=row.pk)
    assert touched.expires_at == row.expires_at
    assert touched.last_accessed_at is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1 day", True])
def test_seconds_that_are_none_are_refused(value):
    row = stored("done", expires_at=ago(-60))
    with pytest.raises((TypeError, ValueError), match="extend_seconds"):
        touch_job(row.uid, value)


def test_each_touch_of_a_running_job_is_seen_by_others(worker):
    uid = enqueue("export", "long")
    one = worker(topics=["export"])
    wait_until(lambda: get_job(uid).status == "running", because="it runs", within=30)
    before = None
    for _ in range(3):
        assert touch_job(uid)
        now = get_job(uid).last_accessed_at
        assert before is None or now > before
        before = now
        time.sleep(0.01)
    cancel_job(uid)
    wait_until(lambda: get_job(uid).status == "failed", because="it is cancelled", within=30)
    one.stop()


# -- list ----------------------------------------------------------------------------


def test_a_list_shows_the_newest_first_without_the_expired_and_without_plain_jobs():
    done = stored("done")
    waits = stored("pending", expires_at=ago(5))
    runs = stored("running", owner_kind="auth.user", owner_id="7", expires_at=ago(5))
    failed = make_job("other", status="failed", uid=queue.uuid7())
    expired = [stored("done", expires_at=ago(1)), stored("failed", expires_at=ago(1))]
    make_job("export")

    assert uids(list_jobs()) == uids([failed, runs, waits, done])
    assert uids(list_jobs("export")) == uids([runs, waits, done])
    assert uids(list_jobs(expired=True))[:2] == uids(reversed(expired))
    assert uids(list_jobs(owner=("auth.user", 7))) == uids([runs])
    assert uids(list_jobs(kind="export", status="failed", expired=True)) == uids(expired[1:])
    by_status = {s: uids(list_jobs(status=s)) for s in ("pending", "running", "done", "failed")}
    assert by_status == {
        "pending": uids([waits]),
        "running": uids([runs]),
        "done": uids([done]),
        "failed": uids([failed]),
    }
    with pytest.raises(ValueError, match="status takes one of pending, running, done, failed"):
        list_jobs(status="finished")


def test_a_kind_or_an_owner_that_no_column_can_hold_has_no_jobs():
    stored("done")

    assert list(list_jobs("export\0")) == []
    assert list(list_jobs(owner=("auth.user", "1\0"))) == []


def test_a_list_fetches_nothing_long(django_assert_num_queries):
    stored("done", payload='{"a":1}', result='{"b":2}', traceback="x" * 1000)
    with django_assert_num_queries(1):
        (row,) = list_jobs()
        assert "payload" not in row.__dict__
    assert (row.payload, row.result) == ({"a": 1}, {"b": 2})


# -- delete --------------------------------------------------------------------------


def test_deleting_ends_a_life_now(export):
    done, failed = stored("done"), stored("failed", expires_at=ago(-60))
    waits = enqueue("export", {})

    assert [delete_job(uid) for uid in (done.uid, failed.uid, waits)] == [True] * 3
    assert not Job.objects.exists()
    assert export == ["done", "failed"]
    assert delete_job(waits)
    assert delete_job("x")


def test_a_job_that_waits_is_cleaned_up_also_when_it_is_deleted_in_a_transaction(export):
    uid = enqueue("export", {})
    with transaction.atomic():
        assert delete_job(uid)

    assert export == ["failed"]
    assert get_job(uid) is None


def test_a_running_job_is_asked_to_stop_and_deleted_by_the_next_call(worker, export):
    uid = enqueue("export", "long")
    worker(topics=["export"])
    wait_until(lambda: get_job(uid).status == "running", because="it runs", within=30)

    assert not delete_job(uid)
    wait_until(lambda: get_job(uid).status == "failed", because="it was asked to stop", within=30)
    assert get_job(uid).reason == "cancelled"
    assert delete_job(uid)
    assert get_job(uid) is None
    assert export == ["running"]


def test_a_job_whose_cleanup_fails_is_gone_for_its_owner_and_left_to_the_sweep(export):
    class Stuck(type(registered())):  # type: ignore[misc]
        kind = "stuck"

        def cleanup(self, job: ServiceJob) -> None:
            raise OSError("the disk is gone")

    register(Stuck)
    row = make_job("stuck", status="done")

    assert not delete_job(row.uid)
    assert list(list_jobs()) == []
    assert Job.objects.get().lease_until > timezone.now()


def registered() -> JobService:
    from myxo_jobs.services.service import service_of

    return service_of("export")


def test_one_that_cannot_be_cancelled_is_deleted_when_it_has_ended():
    @register
    class Firm(JobService):
        kind = "firm"
        cancellable = False

        def process(self, job: ServiceJob) -> None: ...

    uid = enqueue("firm", {})
    assert not delete_job(uid)
    assert get_job(uid).status == "pending"
    Job.objects.update(due=None)
    assert delete_job(uid)


# -- plain kept jobs, and the card -----------------------------------------------------


def test_plain_kept_jobs_are_found_and_touched_too(worker):
    import msgspec

    class Task(msgspec.Struct, frozen=True):
        name: str

    seen = threading.Event()

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> dict[str, str]:
        seen.set()
        return {"name": request.name}

    worker(topics=["t.Keep"])
    job_id = jobs.put(Task("a"))
    row = wait_until(
        lambda: Job.objects.filter(pk=job_id, due=None).first(), because="it is done", within=30
    )
    found = get_job(row.uid)

    assert (found.payload, found.result) == (Task("a"), {"name": "a"})
    assert touch_job(row.uid)
    assert get_job(row.uid).expires_at > row.expires_at


def test_a_failed_plain_job_that_stays_does_not_begin_to_expire():
    row = make_job("t.Keep", status="failed", uid=queue.uuid7())

    assert touch_job(row.uid, 60)
    assert get_job(row.uid).expires_at is None


def test_the_card_adds_up_what_there_is():
    for number in range(20):
        stored("done", duration_ms=(number + 1) * 1000, item_count=2, bytes_in=3)
    with_file = '{"file":"x","storage":"default","file_bytes":7}'
    stored("done", duration_ms=21_000, result=with_file, bytes_out=7)
    stored("done", expires_at=ago(5), duration_ms=22_000, result=with_file, bytes_out=7)
    stored("done", created_at=ago(40 * 86_400), duration_ms=10**9)
    stored("failed")
    stored("running")
    enqueue("export", {})
    make_job("other", status="done")

    expected = {
        "pending": 1,
        "running": 1,
        "done": 22,
        "failed": 1,
        "items": 40,
        "bytes_in": 60,
        "bytes_out": 14,
        "mean_seconds": 11.5,
        "p95_seconds": 21.0,
        "space_held": 7,
    }
    assert service_stats("export") == expected
    assert service_stats() == expected
    assert service_stats("export", days=60)["done"] == 23
    with pytest.raises(ValueError, match="no service of kind 'other'"):
        service_stats("other")


def test_the_space_held_is_that_of_the_files_whatever_a_service_tells_of_itself():
    stored("done", result='{"bytes_out":5,"file":"x","storage":"s","file_bytes":7}', bytes_out=5)
    stored("done", result='{"file":"y","storage":"s","file_bytes":1}', bytes_out=1)
    stored("done", result='{"file_bytes":9}')
    stored("done", result='{"file":null,"file_bytes":9}')
    stored("done", result='{"file":"x","file_bytes":"nine"}')
    stored("done", result='[{"file":"x","file_bytes":9}]')
    stored("done", result='by SQL, "file_bytes":')

    assert service_stats("export")["space_held"] == 8
    assert service_stats("export")["bytes_out"] == 6


def test_the_card_reads_no_result_that_is_long(worker, ended):
    def process(self: JobService, job: ServiceJob) -> dict[str, Any]:
        with job.file("a \"quoted' näme.txt", text=True) as f:
            f.write("five!")
        return {"file": f.name, "storage": "mine", "rows": ["x" * 1000] * 1000}

    register(type("Long", (JobService,), {"kind": "long", "process": process}))
    worker(topics=["long"])
    long = ended(enqueue("long", {}))
    assert len(long.result["rows"]) == 1000
    tracemalloc.start()
    with CaptureQueriesContext(connection) as queries:
        stats = service_stats("long")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert stats["space_held"] == 5
    assert 'SELECT "myxo_jobs"."result"' not in str(queries.captured_queries)
    assert most < 900_000


@pytest.mark.parametrize("days", [-1, float("nan"), float("inf"), 1e12, 10**30, "7", True, None])
def test_days_that_are_none_are_refused(days):
    with pytest.raises((TypeError, ValueError), match="days takes"):
        service_stats("export", days=days)


def test_the_card_of_a_kind_without_jobs_is_empty():
    stats = service_stats("export")

    assert stats["mean_seconds"] is stats["p95_seconds"] is None
    assert sum(value for value in stats.values() if value) == 0


# -- what cannot be removed now --------------------------------------------------------


class Disk:
    """What a service left elsewhere, on something that is away at first."""

    def __init__(self) -> None:
        self.is_away = True
        self.tries: list[str] = []

    def remove(self, job: ServiceJob) -> None:
        self.tries.append(job.status)
        if self.is_away:
            raise SystemExit("the disk is away")


@pytest.fixture
def disk() -> Disk:
    """Register a service of kind `print`, whose jobs fail if they are put with `bad`."""
    disk = Disk()

    @register
    class Print(JobService):
        kind = "print"
        attempts = 1

        def process(self, job: ServiceJob) -> None:
            if job.payload == "bad":
                raise ValueError

        def cleanup(self, job: ServiceJob) -> None:
            disk.remove(job)

    return disk


def sweep(topic: str = "print") -> None:
    Sweeper("default", [handler_of(topic)], tokens.next).sweep()


def test_a_failed_job_whose_cleanup_did_not_come_through_is_cleaned_up_before_its_row_goes(
    disk, worker
):
    uid = enqueue("print", "bad")
    worker(topics=["print"])
    wait_until(lambda: get_job(uid).status == "failed", because="it has failed", within=30)
    assert get_job(uid).worker == ""
    Job.objects.update(expires_at=ago(5))
    sweep()
    assert get_job(uid) is not None
    sweep()
    assert disk.tries == ["running", "failed"]  # not again for a while

    disk.is_away = False
    Job.objects.update(lease_until=ago(1))
    sweep()
    assert get_job(uid) is None
    assert disk.tries == ["running", "failed", "failed"]


def test_failed_jobs_that_cannot_be_cleaned_up_hold_up_no_others(disk, monkeypatch):
    monkeypatch.setattr(sweeping, "LARGEST_SLICE", 2)
    bad = [
        make_job("print", status="failed", expires_at=ago(60), lease_until=ago(60)) for _ in "abc"
    ]
    make_job("print", status="failed", expires_at=ago(5))
    sweep()

    assert set(Job.objects.values_list("pk", flat=True)) == {row.pk for row in bad}
    assert disk.tries == ["failed"] * 3


@pytest.mark.parametrize("payload", ["good", "bad"], ids=["done", "failed"])
def test_a_delete_that_failed_can_be_tried_again_at_once(disk, payload):
    uid = enqueue("print", payload)
    run_jobs(raise_errors=False)
    assert not delete_job(uid)
    assert list(list_jobs()) == []
    assert not delete_job(uid)

    disk.is_away = False
    assert delete_job(uid)
    assert get_job(uid) is None
    assert len(disk.tries) == (3 if payload == "good" else 4)


def test_a_delete_does_not_wait_for_the_pause_of_the_sweep(disk):
    uid = enqueue("print", "good")
    run_jobs()
    Job.objects.update(expires_at=ago(5))
    sweep()
    disk.is_away = False

    assert delete_job(uid)
    assert disk.tries == ["done", "done"]


@pytest.mark.parametrize("end", [delete_job, lambda uid: jobs.discard(get_job(uid).pk)])
def test_a_cancelled_job_whose_cleanup_did_not_come_through_is_cleaned_up_with_its_row(disk, end):
    uid = enqueue("print", "good")
    cancel_job(uid)
    disk.is_away = False

    assert end(uid)
    assert get_job(uid) is None
    assert disk.tries == ["failed", "failed"]


def test_what_was_cleaned_up_at_its_failure_is_not_cleaned_up_again(disk):
    disk.is_away = False
    failed, cancelled = enqueue("print", "bad"), enqueue("print", "good", delay=60)
    run_jobs(raise_errors=False)
    cancel_job(cancelled)

    assert delete_job(failed)
    assert delete_job(cancelled)
    assert disk.tries == ["running", "failed"]


def test_a_retry_of_a_job_that_could_not_be_cleaned_up_runs_it_at_once(disk):
    uid = enqueue("print", "bad")
    run_jobs(raise_errors=False)
    Job.objects.update(expires_at=ago(5))
    sweep()
    assert jobs.retry(get_job(uid).pk)
    assert run_jobs(raise_errors=False) == 1


# -- in a transaction ------------------------------------------------------------------


@pytest.mark.parametrize("status", ["done", "failed", "pending"])
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("how", ["delete", "discard"])
def test_a_job_deleted_in_a_transaction_is_cleaned_up_with_the_commit(disk, status, commits, how):
    uid = enqueue("print", "bad" if status == "failed" else "good")
    if status != "pending":
        run_jobs(raise_errors=False)
    before = Job.objects.values().get()
    tries = len(disk.tries)
    disk.is_away = False
    with transaction.atomic():
        assert delete_job(uid) if how == "delete" else jobs.discard(get_job(uid).pk)
        assert len(disk.tries) == tries
        transaction.set_rollback(not commits)

    if not commits:
        assert Job.objects.values().get() == before
        assert len(disk.tries) == tries
        return
    assert get_job(uid) is None
    assert len(disk.tries) == tries + (0 if (status, how) == ("pending", "discard") else 1)
