"""Routers that send reads to a replica: the queue is where its writes go."""

from __future__ import annotations

import msgspec
import pytest

from myxo_jobs import Jobs, job
from myxo_jobs.models import Job
from myxo_jobs.testing import put_jobs
from tests.app.models import Note
from tests.rig import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str


class ReplicaRouter:
    """Reads go to a replica so far behind that it has no row at all."""

    def db_for_read(self, model, **hints):
        return "other"

    def db_for_write(self, model, **hints):
        return "default"

    def allow_relation(self, one, other, **hints):
        return True


@pytest.fixture(autouse=True)
def replica(settings):
    settings.DATABASE_ROUTERS = [f"{__name__}.ReplicaRouter"]
    Note.objects.create(text="where am I")
    assert not Note.objects.exists()  # the router is in effect


def test_jobs_run_promptly_behind_a_router_that_reads_from_a_replica(worker):
    started: list[str] = []
    mended = False

    @job(Task, topic="t.Task", attempts=1)
    def handle(request: Task) -> None:
        started.append(request.name)
        if request.name == "breaks" and not mended:
            raise ValueError("not yet")

    worker(topics=["t.Task"])
    jobs.put(Task("works"))
    wait_until(lambda: started == ["works"], because="it starts", within=3)

    job_id = jobs.put(Task("breaks"), key="the one") or 0
    row = wait_until(lambda: (row := jobs.get(job_id)) and row.failed and row, because="it fails")
    assert row.error == "ValueError: not yet"
    assert put_jobs(Task) == [Task("breaks")]
    assert jobs.put(Task("again"), key="the one") is None

    mended = True
    assert jobs.retry(job_id)
    wait_until(lambda: jobs.get(job_id) is None, because="the retried one is done", within=3)
    assert started == ["works", "breaks", "breaks"]

    gone = jobs.put(Task("discarded"), delay=60) or 0
    assert jobs.discard(gone)
    assert not Job.objects.exists()
    assert not Job.objects.using("default").exists()


def test_a_row_that_is_read_again_is_read_from_the_primary():
    row = Job.objects.create(topic="t.Task", payload="{}")

    row.refresh_from_db()

    assert row.status == "pending"
