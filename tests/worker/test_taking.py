"""Which jobs a worker takes, when, and how soon."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from datetime import timedelta

import msgspec
import pytest
from django.db import connection
from django.utils import timezone

from myxo_jobs import Jobs, Run, Snooze, job
from myxo_jobs.models import Job
from myxo_jobs.testing import Worker
from myxo_jobs.worker.board import Board
from tests.rig import ago, make_job, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str = ""


class Other(msgspec.Struct, frozen=True):
    name: str = ""


def names(*wanted: str) -> list[Task]:
    return [Task(name) for name in wanted]


# -- soon ---------------------------------------------------------------------


@pytest.mark.needs_a_session("LISTEN hears nothing there, so a put is found by polling")
def test_an_idle_worker_picks_up_a_put_long_before_it_would_look_again(worker):
    started: list[float] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(time.monotonic())

    worker(topics=["t.Task"], poll=60)
    delays = []
    for place in range(1, 6):
        time.sleep(0.4)  # the worker is idle, and listens
        put = time.monotonic()
        jobs.put(Task())
        wait_until(lambda: len(started) == place, because="the put is heard of", within=5)  # noqa: B023
        delays.append(started[-1] - put)
    # Milliseconds, on a quiet machine.
    assert sorted(delays)[2] < 0.5, delays


@pytest.mark.needs_a_session("LISTEN hears nothing there, so the first put is found by polling")
def test_jobs_put_while_the_worker_is_busy_start_without_waiting_for_a_look(worker):
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)
        time.sleep(0.2)

    worker(topics=["t.Task"], poll=60)
    time.sleep(0.5)
    for name in "abcdef":
        jobs.put(Task(name))
        time.sleep(0.03)  # some of the wake-ups fall into the window of another
    wait_until(lambda: len(started) == 6, because="all have started", within=5)
    assert started == list("abcdef")


def test_a_delayed_job_starts_when_it_is_due_and_not_before(worker):
    started: list[float] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(time.monotonic())

    worker(topics=["t.Task"])
    put = time.monotonic()
    jobs.put(Task(), delay=1.5)
    wait_until(lambda: started, because="it is due")
    assert 1.5 <= started[0] - put < 3.5


def test_a_worker_wakes_for_a_job_that_sql_made_due(worker):
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)

    worker(topics=["t.Task"])
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into myxo_jobs (topic, payload) values ('t.Task', %s)", ['{"name": "by SQL"}']
        )
    wait_until(lambda: started, because="polling finds it", within=4)
    assert started == ["by SQL"]


# -- in order -----------------------------------------------------------------


def test_an_idle_worker_starts_what_comes_to_stand_before_all_that_it_has_seen(worker):
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)

    worker(topics=["t.Task"], poll=0.2)
    jobs.put(Task("the first"))
    wait_until(lambda: started, because="it has seen one")
    for place in range(2, 12):
        time.sleep(0.3)  # it has nothing to do, and looks now and then
        # Not by `make_job`, which would read it again: it may be done by then.
        earlier = ago(100 + place)
        Job.objects.create(topic="t.Task", payload='{"name": "earlier"}', due=earlier)
        wait_until(lambda: len(started) == place, because="an earlier one starts", within=3)  # noqa: B023


def test_jobs_of_one_slot_start_by_priority_and_then_in_the_order_of_their_puts(worker):
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)

    jobs.put_many(names("a", "b"), priority=0)
    jobs.put_many(names("c", "d"), priority=10)
    jobs.put_many(names("e"), priority=-10)
    jobs.put_many(names("f"), priority=10)
    worker(topics=["t.Task"])
    wait_until(lambda: not Job.objects.exists(), because="all are done")
    assert started == ["c", "d", "f", "a", "b", "e"]


# -- without waiting for others -----------------------------------------------


def test_a_slow_topic_with_a_long_backlog_does_not_hold_up_another(worker):
    let_go = threading.Event()
    started: list[str] = []

    @job(Task, topic="t.Slow", workers=2)
    def slow(request: Task) -> None:
        let_go.wait(30)

    @job(Other, topic="t.Quick")
    def quick(request: Other) -> None:
        started.append(request.name)

    jobs.put_many([Task()] * 500)
    worker(topics=["t.Slow", "t.Quick"])
    wait_until(lambda: Job.objects.filter(status="running").count() == 2, because="slots are busy")
    try:
        put = time.monotonic()
        for number in range(5):
            jobs.put(Other(str(number)))
        wait_until(lambda: len(started) == 5, because="the short ones start", within=2)
        assert time.monotonic() - put < 2.0
        # Nothing of the backlog is taken that no slot is free for.
        assert Job.objects.filter(topic="t.Slow", status="running").count() == 2
        Job.objects.filter(topic="t.Slow", status="pending").delete()
    finally:
        let_go.set()


@pytest.mark.parametrize("first", ["long", "short"])
def test_a_free_slot_keeps_taking_work_while_a_long_job_runs(worker, first):
    let_go = threading.Event()
    done: list[str] = []

    @job(Task, topic="t.Task", workers=2)
    def handle(request: Task) -> None:
        if request.name == "long":
            let_go.wait(30)
        done.append(request.name)

    running = worker(topics=["t.Task"])
    if first == "short":  # so that the worker takes the topic's jobs for quick ones
        jobs.put_many(names(*["short"] * 50))
        wait_until(lambda: not Job.objects.exists(), because="the short ones are done")
    jobs.put_many(names("long", *["short"] * 200))
    try:
        wait_until(lambda: Job.objects.count() == 1, because="the short ones are done", within=15)
        assert "long" not in done
    finally:
        let_go.set()
    wait_until(lambda: not Job.objects.exists(), because="the long one is done, too")
    running.stop()


def test_a_claimed_job_that_does_not_start_is_given_back_at_its_place_without_an_attempt(worker):
    let_go = threading.Event()
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)
        if request.name == "long":
            let_go.wait(30)

    worker(topics=["t.Task"])
    jobs.put_many(names(*["quick"] * 100))
    wait_until(lambda: not Job.objects.exists(), because="the topic is known to be quick")
    jobs.put_many(names("long", "next 1", "next 2", "next 3"))
    before = list(Job.objects.order_by("id").values_list("id", "due"))
    try:
        wait_until(lambda: started[-1] == "long", because="the long one starts")
        wait_until(
            lambda: Job.objects.filter(status="running").count() == 1,
            because="the others are given back",
            within=3,
        )
        time.sleep(0.5)  # and are not taken again while no slot is free
        rows = Job.objects.order_by("id")
        assert list(rows.values_list("id", "due")) == before
        assert all(row.started_at for row in rows)  # one claim took all four
        assert [(row.status, row.attempts) for row in rows] == [
            ("running", 1),
            ("pending", 0),
            ("pending", 0),
            ("pending", 0),
        ]
        assert {(row.worker, row.lease_until) for row in rows if row.status == "pending"} == {
            ("", None)
        }
    finally:
        let_go.set()
    wait_until(lambda: not Job.objects.exists(), because="all are done")
    assert started[-4:] == ["long", "next 1", "next 2", "next 3"]


def test_a_job_that_comes_to_stand_before_those_already_seen_is_found_by_an_idle_worker(worker):
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)

    worker(topics=["t.Task"], poll=0.2)
    for place in range(3):
        jobs.put(Task("new"))
        wait_until(lambda: len(started) == 2 * place + 1, because="it is seen")  # noqa: B023
        time.sleep(0.3)  # the worker is idle
        due = timezone.now() - timedelta(minutes=1)
        make_job("t.Task", due=due, payload='{"name": "late"}')
        wait_until(lambda: len(started) == 2 * place + 2, because="it is found", within=5)  # noqa: B023


# -- suspects -----------------------------------------------------------------


def test_a_job_whose_claim_is_over_is_claimed_alone_and_at_its_old_place(worker):
    claims: list[tuple[str, str, int]] = []

    @job(Task, topic="t.Task", workers=8)
    def handle(request: Task, run: Run) -> None:
        claims.append((Job.objects.get(pk=run.id).worker, request.name, run.attempt))

    for name in "abc":
        make_job("t.Task", payload=f'{{"name": "{name}"}}')
    for name in "de":
        make_job("t.Task", status="expired", payload=f'{{"name": "{name}"}}')
    make_job("t.Task", payload='{"name": "f"}')
    worker(topics=["t.Task"])
    wait_until(lambda: not Job.objects.exists(), because="all are done")

    assert sorted((name, attempt) for _, name, attempt in claims) == [
        ("a", 1),
        ("b", 1),
        ("c", 1),
        ("d", 3),
        ("e", 3),
        ("f", 1),
    ]
    token = {name: token for token, name, _ in claims}
    assert token["a"] == token["b"] == token["c"]
    assert len({token["a"], token["d"], token["e"], token["f"]}) == 4


def test_a_job_that_lost_its_worker_in_its_last_attempt_is_failed_and_not_started_again(worker):
    started: list[str] = []

    @job(Task, topic="t.Task", attempts=2)
    def handle(request: Task) -> None:
        started.append(request.name)

    lost = make_job("t.Task", status="expired", attempts=2, payload='{"name": "lost"}')
    worker(topics=["t.Task"])
    wait_until(lambda: Job.objects.get(pk=lost.pk).failed, because="it is kept for a person")

    row = Job.objects.get(pk=lost.pk)
    assert started == []
    assert row.attempts == 2
    assert row.error.startswith("WorkerLost: the worker was lost")
    assert (row.worker, row.lease_until) == ("", None)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("busy", [False, True], ids=["from the start", "amid the work"])
def test_no_backlog_of_quick_jobs_keeps_a_dead_worker_s_job_waiting(worker, slots, busy):
    started: dict[str, float] = {}

    @job(Task, topic="t.Task", workers=slots)
    def handle(request: Task) -> None:
        started.setdefault(request.name, time.monotonic())
        time.sleep(0.005)

    jobs.put_many([Task("backlog")] * 6000)
    if not busy:
        make_job("t.Task", status="expired", payload='{"name": "lost"}')
    worker(topics=["t.Task"])
    wait_until(lambda: Job.objects.count() < 5800, because="the topic is known to be quick")
    if busy:
        make_job("t.Task", status="expired", payload='{"name": "lost"}')
    ready = time.monotonic()
    try:
        wait_until(lambda: "lost" in started, because="it has its turn")
        assert started["lost"] - ready < 2.5
        assert Job.objects.count() > 1000  # it was not the last one
    finally:
        Job.objects.filter(status="pending").delete()


def test_a_busy_worker_takes_a_killed_neighbour_s_job_as_soon_as_the_supervisor_tells(worker):
    started: dict[str, float] = {}

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.setdefault(request.name, time.monotonic())
        time.sleep(0.005)

    board = Board()
    jobs.put_many([Task("backlog")] * 6000)
    worker(topics=["t.Task"], board=board)
    waits = []
    try:
        for name in ("first", "second", "third"):
            done = Job.objects.count()
            wait_until(lambda: Job.objects.count() < done - 100, because="it is busy")  # noqa: B023
            make_job("t.Task", status="expired", payload=f'{{"name": "{name}"}}')
            board.tell_of_suspects()
            told = time.monotonic()
            wait_until(lambda: name in started, because="it has its turn")  # noqa: B023
            waits.append(started[name] - told)
        # Without being told it asks once a second. What it has ahead lasts for 0.2 s.
        assert sorted(waits)[1] < 0.6, waits
    finally:
        Job.objects.filter(status="pending").delete()


def test_several_jobs_of_a_dead_worker_start_one_soon_after_the_other(worker):
    let_go = threading.Event()
    started: dict[str, float] = {}

    @job(Task, topic="t.Task", workers=3)
    def handle(request: Task) -> None:
        started[request.name] = time.monotonic()
        let_go.wait(30)

    for name in "abc":
        make_job("t.Task", status="expired", attempts=1, payload=f'{{"name": "{name}"}}')
    began = time.monotonic()
    worker(topics=["t.Task"], poll=60)
    try:
        wait_until(lambda: len(started) == 3, because="all three have started", within=5)
        assert max(started.values()) - began < 3.0
    finally:
        let_go.set()


def test_a_drain_leaves_no_job_of_a_dead_worker_behind_though_another_one_raises(worker):
    started: list[str] = []

    @job(Task, topic="t.Task", workers=2, backoff=60)
    def handle(request: Task) -> None:
        started.append(request.name)
        raise LookupError("not there")

    for name in "abc":
        make_job("t.Task", status="expired", attempts=1, payload=f'{{"name": "{name}"}}')
    draining = worker(topics=["t.Task"], drain=True)
    assert wait_until(lambda: draining.join(0.1), because="the drain ends")
    assert started == ["a", "b", "c"]


# -- rows that go -------------------------------------------------------------


def test_a_waiting_job_that_is_deleted_never_starts(worker):
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)

    by_sql, by_python = jobs.put(Task("by SQL"), delay=0.7), jobs.put(Task("by Python"), delay=0.7)
    jobs.put(Task("stays"), delay=0.7)
    worker(topics=["t.Task"])
    with connection.cursor() as cursor:
        cursor.execute("delete from myxo_jobs where id = %s", [by_sql])
    assert jobs.discard(by_python or 0)

    wait_until(lambda: started, because="the third one starts")
    wait_until(lambda: not Job.objects.exists(), because="the queue is empty")
    assert started == ["stays"]


@pytest.mark.parametrize(
    "raised",
    [None, ValueError("no"), Snooze(60), Snooze(0)],
    ids=["returns", "raises", "snoozes", "gives back"],
)
def test_a_running_job_that_is_deleted_ends_with_one_line_and_does_not_come_back(
    worker, caplog, raised
):
    let_go = threading.Event()
    started: list[str] = []

    @job(Task, topic="t.Task", lease=1)
    def handle(request: Task) -> None:
        started.append(request.name)
        let_go.wait(30)
        if raised and request.name == "deleted":
            raise raised

    running = worker(topics=["t.Task"])
    job_id = jobs.put(Task("deleted"))
    wait_until(lambda: started, because="it runs")
    with connection.cursor() as cursor:
        cursor.execute("delete from myxo_jobs where id = %s", [job_id])
    time.sleep(1.0)  # longer than a renewal waits
    let_go.set()
    jobs.put(Task("next"))
    wait_until(lambda: started == ["deleted", "next"], because="the worker is fine", within=5)
    wait_until(lambda: not Job.objects.exists(), because="the next one is done")
    running.stop()

    assert started == ["deleted", "next"]
    lines = [r for r in caplog.records if getattr(r, "job", 0) == job_id and r.levelname != "DEBUG"]
    assert [r.levelname for r in lines] == ["WARNING"]
    assert "deleted" in lines[0].getMessage()


# -- a worker's choices -------------------------------------------------------


def test_workers_of_the_worker_replace_those_of_the_topics(worker):
    all_six = threading.Barrier(6)

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        all_six.wait(10)

    worker(topics=["t.Task"], workers=6)
    jobs.put_many([Task()] * 6)
    wait_until(lambda: not Job.objects.exists(), because="six run at once", within=8)


def test_a_worker_that_is_stopped_before_its_start_leaves_nothing_open():
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)

    jobs.put(Task("stays"))
    stopped = Worker(topics=["t.Task"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        stopped.stop()
        assert stopped.join()
        stopped.start()  # it was told to stop, and does
        assert stopped.join(3)
        del stopped
        gc.collect()
    assert started == []


def test_a_drain_ends_once_nothing_is_due_and_does_not_wait_for_the_claims_of_others(worker):
    started: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)
        if request.name == "puts":
            jobs.put(Other("put by a job"))

    @job(Other, topic="t.Other")
    def other(request: Other) -> None:
        started.append(request.name)

    make_job("t.Task", status="running")
    jobs.put(Task("later"), delay=60)
    jobs.put(Task("puts"))
    draining = worker(topics=["t.Other", "t.Task"], drain=True)
    assert wait_until(lambda: draining.join(0.1), because="the drain ends", within=10)
    assert started == ["puts", "put by a job"]
    assert sorted(Job.objects.values_list("status", flat=True)) == ["pending", "running"]


def test_a_look_finds_a_suspect_though_a_wake_up_has_told_of_fresh_jobs(make_job):
    """The claim that follows a wake-up asks for none, so the look must not leave it to that."""

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None: ...

    worker = Worker(topics=["t.Task"], drain=True)
    (lane,) = worker._lanes.values()
    lane.hopeful = False
    make_job("t.Task", status="expired", due=ago(500))
    worker._on_wake({"t.Task"})
    try:
        worker._look()
    finally:
        worker._own().close()
    assert lane.hopeful
