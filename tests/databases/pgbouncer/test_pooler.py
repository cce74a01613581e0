"""What holds behind pgbouncer in transaction mode, where a session is nobody's own."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest
from django.db import connection, connections

from myxo_jobs import Jobs, Run, job
from myxo_jobs.databases import database_of
from myxo_jobs.databases.postgres import Clocks
from myxo_jobs.models import Job
from tests.app.jobs import Work
from tests.app.models import Note
from tests.databases.postgres.server import cut_all_sessions
from tests.pgbouncer import command
from tests.rig import ago, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()
POOL = 3
UNHEARD = "wake-ups do not arrive here"
# The listener proves itself in this time, or gives up.
PROVING_SECONDS = 2 * 2.0 + 2.0


class Task(msgspec.Struct, frozen=True):
    name: str = ""


@pytest.fixture
def ran() -> list[str]:
    """The names of the jobs of `t.Task` that have run."""
    names: list[str] = []

    @job(Task, topic="t.Task", workers=4)
    def handle(request: Task, run: Run) -> None:
        Note.objects.create(text=request.name)
        names.append(f"{request.name} {run.attempt}")

    return names


def at_the_console(words: str) -> list[dict[str, Any]]:
    return command(os.environ["MYXO_TEST_PGBOUNCER"], words)


def clients() -> int:
    """Return how many connections there are to the pooler, but for this test's own."""
    rows = at_the_console("SHOW CLIENTS")
    name = connection.settings_dict["NAME"]
    return sum(row["database"] == name for row in rows) - (connection.connection is not None)


def test_a_worker_that_cannot_hear_says_so_once_and_polls(runjobs, ledger):
    process = runjobs("--poll", "0.5")
    process.wait_for_log(UNHEARD, within=PROVING_SECONDS + 5)
    for number in range(5):
        jobs.put(Work(str(number)))
        put = time.monotonic()
        wait_until(lambda: ledger.count("begin", name=str(number)), because="it is found")  # noqa: B023
        assert time.monotonic() - put < 0.5 + 1.0
    time.sleep(PROVING_SECONDS)

    assert process.log().count(UNHEARD) == 1
    assert process.exit_code is None


def test_a_worker_that_cannot_hear_leaves_no_session_that_listens(worker, caplog, ran):
    worker(topics=["t.Task"])
    wait_until(lambda: UNHEARD in caplog.text, because="it gives up", within=PROVING_SECONDS + 5)

    assert "myxo_jobs" not in channels()
    # The loop's and the lease keeper's; the listener's is closed.
    wait_until(lambda: clients() <= 2, because="the listener is gone")


def channels() -> set[str]:
    """Return what the sessions of the pooler listen to, which gives them to anybody."""
    found = set()
    with ExitStack() as stack:
        for _ in range(POOL):  # at once, so that each has another session
            other = stack.enter_context(closing(connections.create_connection("default")))
            cursor = stack.enter_context(other.cursor())
            cursor.execute("BEGIN")
            cursor.execute("SELECT pg_listening_channels()")
            found |= {name for (name,) in cursor.fetchall()}
    return found


def test_jobs_are_done_at_their_first_attempt_after_the_poolers_sessions_were_cut(worker, ran):
    worker(topics=["t.Task"])
    jobs.put(Task("before"))
    wait_until(lambda: ran and not Job.objects.exists(), because="it is done")
    connection.close()
    cut_all_sessions()

    jobs.put(Task("after"))
    wait_until(lambda: not Job.objects.exists(), because="it is done", within=5)
    assert ran == ["before 1", "after 1"]


def test_a_worker_has_three_connections_to_the_pooler_beside_its_threads(worker, caplog, ran):
    running = worker(topics=["t.Task"])
    most = 0
    for _ in range(3):
        jobs.put_many([Task()] * 50)
        while Job.objects.exists():
            most = max(most, clients())
    assert 0 < most <= 4 + 3 + 1
    running.stop()
    connection.close()
    wait_until(lambda: clients() == 0, because="none is left")


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "new"])
def test_a_claim_that_a_paused_pooler_held_back_takes_no_job_whose_holder_lives(
    make_job, claim_some, monkeypatch, is_known
):
    monkeypatch.setattr(database_of("default"), "_clocks", Clocks())
    row = make_job("t.Task", status="running", lease_until=ago(-1))
    if is_known:
        assert claim_some("t.Task") == []
    at_the_console("PAUSE")
    resume = threading.Timer(2.0, at_the_console, ["RESUME"])
    resume.start()
    began = time.monotonic()
    assert claim_some("t.Task") == []  # its holder could not renew it either
    assert time.monotonic() - began > 1.5
    resume.join()

    assert [claim.job_id for claim in claim_some("t.Task")] == [row.pk]


def test_a_worker_that_is_stopped_while_its_listener_proves_itself_leaves_no_thread(worker):
    started = worker()
    time.sleep(0.5)
    started.stop(grace=0)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("myxo_jobs")]
