"""The table locked, as a migration or VACUUM FULL does it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import psutil

from myxo_jobs import Jobs, job
from tests.app.jobs import Work
from tests.databases.postgres.server import connected_to_the_server
from tests.rig import ago, make_job, wait_until


class Task(msgspec.Struct, frozen=True):
    name: str = ""


WAITING = """
SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'myxo_jobs'::regclass
"""


@contextmanager
def locked_table(mode: str = "ACCESS EXCLUSIVE") -> Iterator[None]:
    with connected_to_the_server() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"LOCK TABLE myxo_jobs IN {mode} MODE")
        yield


def sessions_that_wait() -> int:
    with connected_to_the_server() as other, other.cursor() as cursor:
        cursor.execute(WAITING)
        return int(cursor.fetchone()[0])


def test_a_worker_leaves_after_its_grace_though_the_table_is_locked(runjobs):
    process = runjobs("--grace", "1")
    with locked_table():
        wait_until(sessions_that_wait, because="the worker waits for the table")
        process.send(signal.SIGTERM)
        assert process.wait(within=1 + 2 + 1) == 0


def test_a_supervisor_leaves_after_its_grace_though_the_table_is_locked(runjobs, ledger):
    process = runjobs("--grace", "1", "--processes", "2")
    Jobs().put(Work("held", seconds=60))
    Jobs().put(Work("held", seconds=60))
    Jobs().put(Work("held", seconds=60))
    wait_until(lambda: ledger.count("begin") == 3, because="both workers run jobs")
    children = psutil.Process(process.pid).children()
    with locked_table():
        wait_until(sessions_that_wait, because="a worker waits for the table")
        children[0].kill()
        wait_until(lambda: "was killed" in process.log(), because="the supervisor knows")
        process.send(signal.SIGTERM)
        assert process.wait(within=1 + 2 + 1.5) == 0
    wait_until(lambda: all(map(is_gone, children)), because="its workers went with it")


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_an_idle_worker_lets_living_holders_renew_first_after_a_lock_on_the_table(worker):
    started: list[float] = []

    @job(Task, topic="t.Task", lease=6)
    def handle(request: Task) -> None:
        started.append(time.monotonic())

    worker(topics=["t.Task"])
    time.sleep(3.0)  # so long that the worker cannot know whether others could write
    make_job("t.Task", status="running", lease_until=ago(-1))
    with locked_table("EXCLUSIVE"):  # which stops writes alone
        wait_until(sessions_that_wait, because="the worker tries to take it")
        assert started == []
    unlocked = time.monotonic()
    wait_until(lambda: started, because="nobody has renewed it", within=5)
    assert started[0] - unlocked > 0.3
