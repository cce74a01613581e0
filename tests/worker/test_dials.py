"""What may be changed of a handler while workers run takes effect within seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from myxo_jobs import Jobs, Run, job
from myxo_jobs.handlers import Dials, registry
from myxo_jobs.models import Job
from myxo_jobs.testing import run_jobs
from tests.rig import handler_of, make_job, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str = ""


@pytest.fixture
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker asks for the dials more often, for tests that wait until it has."""
    monkeypatch.setattr("myxo_jobs.worker.worker.DIALS_EVERY_SECONDS", 0.5)


class Panel:
    """Dials that a test turns, and whom they were asked for."""

    def __init__(self, **dials: Any) -> None:
        self.stand = Dials(**{"keep": 60.0, "limit": 1, "timeout": None} | dials)
        self.asked: list[list[str]] = []

    def read(self, connection: Any, topics: Sequence[str]) -> Mapping[str, Dials]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        self.asked.append(list(topics))
        return dict.fromkeys(topics, self.stand)

    def turn(self, **dials: Any) -> None:
        self.stand = msgspec.structs.replace(self.stand, **dials)


def dialled(panel: Panel, topic: str = "t.Keep") -> None:
    """Give the handler of a topic these dials, as services do."""
    old = handler_of(topic)
    handler = msgspec.structs.replace(old, dials=panel.read)
    registry._by_topic[topic] = registry._by_request[old.request] = handler


def statuses() -> list[str]:
    return sorted(Job.objects.values_list("status", flat=True))


@pytest.mark.usefixtures("asks_often")
def test_a_limit_is_raised_and_lowered_while_a_worker_runs(worker):
    go_on = threading.Semaphore(0)

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None:
        assert go_on.acquire(timeout=30)

    panel = Panel()
    dialled(panel)
    for _ in range(6):
        jobs.put(Task())
    worker(topics=["t.Keep"])
    wait_until(lambda: statuses().count("running") == 1, because="the limit is one")
    panel.turn(limit=3)
    wait_until(lambda: statuses().count("running") == 3, because="the limit is three")

    panel.turn(limit=1)
    asked = len(panel.asked)
    wait_until(lambda: len(panel.asked) > asked + 1, because="the dials were read again")
    go_on.release(2)
    wait_until(lambda: statuses().count("done") == 2, because="two have ended")
    time.sleep(0.5)
    assert statuses() == ["done", "done", "pending", "pending", "pending", "running"]
    go_on.release(10)
    wait_until(lambda: statuses() == ["done"] * 6, because="all are done")


@pytest.mark.usefixtures("asks_often")
def test_a_limit_of_none_pauses_a_topic_and_no_other(worker):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None: ...

    panel = Panel(limit=0)
    dialled(panel)
    paused = jobs.put(Task())
    beside = jobs.put_many([Other()] * 3) if declare_other() else 0
    worker(topics=["t.Keep", "t.Other"])
    wait_until(lambda: Job.objects.count() == 1, because="the others are done")
    time.sleep(1.0)
    assert beside == 3
    assert (jobs.get(paused).status, jobs.get(paused).attempts) == ("pending", 0)

    panel.turn(limit=1)
    wait_until(lambda: jobs.get(paused).status == "done", because="it goes on")


class Other(msgspec.Struct, frozen=True):
    name: str = ""


def declare_other() -> bool:
    @job(Other, topic="t.Other")
    def handle(request: Other) -> None: ...

    return True


def test_a_paused_topic_does_not_keep_a_drain_from_its_end(worker):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None: ...

    dialled(Panel(limit=0))
    jobs.put(Task())
    one = worker(topics=["t.Keep"], drain=True)

    assert one.join(10)
    assert statuses() == ["pending"]


@pytest.mark.usefixtures("asks_often")
def test_a_job_in_hand_stays_as_long_as_is_set_at_its_end(worker):
    ends = threading.Event()

    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None:
        ends.wait(30)

    panel = Panel()
    dialled(panel)
    job_id = jobs.put(Task())
    worker(topics=["t.Keep"])
    wait_until(lambda: statuses() == ["running"], because="it runs")
    panel.turn(keep=3600.0)
    asked = len(panel.asked)
    wait_until(lambda: len(panel.asked) > asked + 1, because="the dials were read again")
    ends.set()
    row = wait_until(
        lambda: Job.objects.filter(pk=job_id, status="done").first(), because="it is done"
    )

    assert row.expires_at - row.completed_at == timedelta(hours=1)


@pytest.mark.usefixtures("asks_often")
def test_a_timeout_is_set_while_a_worker_runs(worker):
    @job(Task, topic="t.Keep", keep=60, attempts=1)
    async def handle(request: Task, run: Run) -> None:
        import asyncio

        await asyncio.sleep(0 if request.name == "quick" else 30)

    panel = Panel()
    dialled(panel)
    worker(topics=["t.Keep"])
    jobs.put(Task("quick"))
    wait_until(lambda: statuses() == ["done"], because="there is no timeout yet")
    panel.turn(timeout=0.2)
    asked = len(panel.asked)
    wait_until(lambda: len(panel.asked) > asked + 1, because="the dials were read again")
    job_id = jobs.put(Task("slow"))
    wait_until(lambda: jobs.get(job_id).status == "failed", because="it took too long")

    assert jobs.get(job_id).reason == "timeout"
    assert jobs.get(job_id).error == "JobTimeout: it took longer than 0.2 s"


def test_handlers_that_share_their_dials_are_asked_together_and_every_two_seconds(worker):
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None: ...

    declare_other()
    panel = Panel()
    dialled(panel)
    read = handler_of("t.Keep").dials
    other = msgspec.structs.replace(handler_of("t.Other"), dials=read)
    registry._by_topic["t.Other"] = registry._by_request[Other] = other
    one = worker(topics=["t.Keep", "t.Other"])
    time.sleep(5.0)
    one.stop()

    assert 1 <= len(panel.asked) <= 4
    assert {tuple(sorted(topics)) for topics in panel.asked} == {("t.Keep", "t.Other")}


def test_a_job_cancelled_while_it_waits_and_run_jobs_follow_the_dials():
    @job(Task, topic="t.Keep", keep=60)
    def handle(request: Task) -> None: ...

    panel = Panel(keep=600.0, limit=0)
    dialled(panel)
    handler = msgspec.structs.replace(handler_of("t.Keep"), failed_expires=True)
    registry._by_topic["t.Keep"] = registry._by_request[Task] = handler
    cancelled = make_job("t.Keep")
    assert jobs.cancel(cancelled.pk)
    put = jobs.put(Task())
    assert run_jobs() == 0  # it is paused
    panel.turn(limit=1)
    assert run_jobs() == 1

    for row in (jobs.get(cancelled.pk), jobs.get(put)):
        assert row.expires_at - row.completed_at == timedelta(minutes=10)
