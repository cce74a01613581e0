"""What a handler finds around it: as if no job had run before it."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection, connections, transaction
from django.utils import timezone, translation

from myxo_jobs import Jobs, Run, job
from myxo_jobs.models import Job
from tests.app.models import Note
from tests.rig import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()
fruit = contextvars.ContextVar("fruit", default="none")


class Task(msgspec.Struct, frozen=True):
    name: str


def queue_is_empty() -> bool:
    return not Job.objects.exists()


# -- connections --------------------------------------------------------------


def open_a_raw_transaction() -> None:
    connection.cursor().execute("BEGIN")
    Note.objects.create(text="left open")


def turn_autocommit_off() -> None:
    transaction.set_autocommit(False)
    Note.objects.create(text="left open")


def leave_a_block() -> None:
    transaction.atomic().__enter__()
    Note.objects.create(text="left open")


def leave_a_broken_block() -> None:
    transaction.atomic().__enter__()
    note = Note.objects.create(text="left open")
    try:
        Note.objects.create(pk=note.pk, text="twice")
    except IntegrityError:
        connection.needs_rollback = True


def put_another_connection_in_place() -> None:
    old = connections["default"]
    connections["default"] = connections.create_connection("default")
    old.close()


def close_the_raw_connection() -> None:
    Note.objects.exists()
    assert connection.connection is not None
    connection.connection.close()


def take_execute_wrappers_away() -> None:
    connection.execute_wrappers.clear()


def add_an_execute_wrapper() -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("left behind by another job")

    connection.execute_wrappers.append(refuse)


@pytest.mark.parametrize(
    "spoil",
    [
        open_a_raw_transaction,
        turn_autocommit_off,
        leave_a_block,
        leave_a_broken_block,
        put_another_connection_in_place,
        close_the_raw_connection,
        take_execute_wrappers_away,
        add_an_execute_wrapper,
    ],
)
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_connection_left_in_a_bad_state_does_not_meet_the_next_job(
    worker, spoil: Callable[[], None], raises: bool
):
    runs: list[tuple[str, int, int]] = []

    @job(Task, topic="t.Task", attempts=1)
    def handle(request: Task, run: Run) -> None:
        runs.append((request.name, run.attempt, threading.get_ident()))
        if request.name == "spoils":
            spoil()
            if raises:
                raise ValueError("after the harm")
        else:
            with transaction.atomic():
                Note.objects.create(text="of the next job")

    worker(topics=["t.Task"])
    jobs.put_many([Task("warms up"), Task("spoils"), Task("works")])
    wait_until(
        lambda: not Job.objects.filter(failed=False).exists(), because="all three ran", within=15
    )

    assert [(name, attempt) for name, attempt, _ in runs] == [
        ("warms up", 1),
        ("spoils", 1),
        ("works", 1),
    ]
    assert len({thread for _, _, thread in runs}) == 1
    assert Job.objects.filter(failed=True).count() == int(raises)
    assert list(Note.objects.values_list("text", flat=True)) == ["of the next job"] * 2


def test_a_connection_left_in_a_bad_state_by_an_async_job_does_not_meet_the_next_one(worker):
    @job(Task, topic="t.Task", attempts=1)
    async def handle(request: Task) -> None:
        if request.name == "spoils":
            await sync_to_async(leave_a_broken_block)()
        else:
            await Note.objects.acreate(text="of the next job")

    worker(topics=["t.Task"])
    jobs.put_many([Task("warms up"), Task("spoils"), Task("works")])
    wait_until(queue_is_empty, because="all three ran")
    assert list(Note.objects.values_list("text", flat=True)) == ["of the next job"] * 2


# -- language, time zone, contexts --------------------------------------------


def surroundings() -> tuple[str, str, str, int]:
    return (
        translation.get_language(),
        timezone.get_current_timezone_name(),
        fruit.get(),
        decimal.getcontext().prec,
    )


def change_surroundings() -> None:
    translation.activate("pt-br")
    timezone.activate("America/Lima")
    fruit.set("mango")
    decimal.getcontext().prec = 5


def test_a_job_sees_the_defaults_of_the_project_whatever_the_last_one_changed(worker, settings):
    seen: list[tuple[str, str, str, int]] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        seen.append(surroundings())
        change_surroundings()

    worker(topics=["t.Task"])
    jobs.put_many([Task("first"), Task("second"), Task("third")])
    wait_until(queue_is_empty, because="all ran")

    assert seen == [(settings.LANGUAGE_CODE, settings.TIME_ZONE, "none", 28)] * 3


def test_an_async_job_sees_the_defaults_of_the_project_whatever_another_one_changed(
    worker, settings
):
    seen: list[tuple[str, str, str, int]] = []

    @job(Task, topic="t.Task", workers=2)
    async def handle(request: Task) -> None:
        seen.append(surroundings())
        change_surroundings()
        await asyncio.sleep(0.05)
        await sync_to_async(change_surroundings)()

    worker(topics=["t.Task"])
    jobs.put_many([Task(f"number {n}") for n in range(4)])
    wait_until(queue_is_empty, because="all ran")

    assert seen == [(settings.LANGUAGE_CODE, settings.TIME_ZONE, "none", 28)] * 4


# -- async --------------------------------------------------------------------


def test_async_handlers_use_the_async_orm_at_once_with_others(worker):
    all_three = asyncio.Barrier(3)

    @job(Task, topic="t.Task", workers=3)
    async def handle(request: Task) -> None:
        note = await Note.objects.acreate(text=request.name)
        await all_three.wait()
        note.words = await Note.objects.acount()
        await note.asave()

    worker(topics=["t.Task"])
    jobs.put_many([Task("a"), Task("b"), Task("c")])
    wait_until(queue_is_empty, because="all ran")
    assert list(Note.objects.values_list("words", flat=True)) == [3, 3, 3]


def test_a_sync_query_in_an_async_handler_is_a_recorded_failure_and_the_worker_is_fine(worker):
    @job(Task, topic="t.Task", attempts=2, backoff=0)
    async def handle(request: Task) -> None:
        if request.name == "sync":
            Note.objects.create(text=request.name)
        await Note.objects.acreate(text=request.name)

    worker(topics=["t.Task"])
    job_id = jobs.put(Task("sync"))
    wait_until(lambda: Job.objects.filter(pk=job_id, failed=True), because="it fails")
    row = Job.objects.get(pk=job_id)
    assert (row.attempts, row.error.split(":")[0].split(".")[-1]) == (2, "SynchronousOnlyOperation")

    later = jobs.put(Task("async"))
    wait_until(lambda: not Job.objects.filter(pk=later), because="the worker is fine", within=5)
    assert list(Note.objects.values_list("text", flat=True)) == ["async"]


def test_a_sync_handler_may_run_an_event_loop_of_its_own(worker):
    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        async def write() -> None:
            await Note.objects.acreate(text=request.name)

        asyncio.run(write())

    worker(topics=["t.Task"])
    jobs.put_many([Task("first"), Task("second")])
    wait_until(queue_is_empty, because="both ran")
    assert list(Note.objects.values_list("text", flat=True)) == ["first", "second"]


def test_a_job_can_put_jobs_in_sync_and_async_handlers(worker):
    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        jobs.put(Echo(request.name))

    @job(Echo, topic="t.Echo")
    async def echo(request: Echo) -> None:
        if request.name != "last":
            await jobs.aput(Echo("last"))
        await Note.objects.acreate(text=request.name)

    worker(topics=["t.Task", "t.Echo"])
    jobs.put(Task("first"))
    wait_until(lambda: Note.objects.count() == 2, because="each put the next")
    wait_until(queue_is_empty, because="all are done")
    assert set(Note.objects.values_list("text", flat=True)) == {"first", "last"}


class Echo(msgspec.Struct, frozen=True):
    name: str


# -- logging ------------------------------------------------------------------


def test_the_logging_of_the_project_is_kept_and_each_record_appears_once(runjobs, ledger):
    from tests.worker.jobs import Fail

    project = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"shop": {"format": "SHOP %(levelname)s %(name)s %(message)s"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "shop"}},
        "root": {"handlers": ["out"], "level": "INFO"},
    }
    process = runjobs("--drain", settings={"LOGGING": project}, ready=False)
    assert process.wait() == 0
    quiet = process.log()
    job_id = jobs.put(Fail("a secret"))
    process = runjobs("--drain", settings={"LOGGING": project}, ready=False)
    assert process.wait() == 0

    log = process.log()
    assert "SHOP INFO myxo_jobs worker=" in quiet
    assert log.count("about to fail: a secret") == 1
    assert log.count("SHOP WARNING shop about to fail") == 1
    assert log.count(f"SHOP ERROR myxo_jobs job={job_id} topic=worker.Fail attempt=1 failed") == 1
    assert log.count("Traceback (most recent call last)") == 1
    assert "DEBUG" not in log
    lines = [line for line in log.splitlines() if "job=" in line or "worker=" in line]
    assert all(line.startswith("SHOP ") for line in lines)
    assert len(lines) == len(set(lines))


def test_a_project_that_logs_nowhere_sees_the_events_of_its_worker_on_stderr(runjobs, ledger):
    from tests.worker.jobs import Fail

    job_id = jobs.put(Fail("a secret"))
    process = runjobs("--drain", settings={"LOGGING": {}}, ready=False)
    assert process.wait() == 0

    log = process.log()
    assert log.count(f"ERROR job={job_id} topic=worker.Fail attempt=1 failed") == 1
    assert log.count("Traceback (most recent call last)") == 1
    assert log.count(" started ") == 1
