"""A worker and its sessions on a PostgreSQL server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from django.conf import settings
from django.db import DatabaseError, connection, transaction

from myxo_jobs import Jobs, Run, job
from myxo_jobs.models import Job
from myxo_jobs.testing import run_jobs
from tests.app.models import Note
from tests.databases.postgres.server import SESSIONS, connected_to_the_server, cut_all_sessions
from tests.rig import ROOT, ago, in_threads, make_job, wait_until
from tests.worker.jobs import Tally

pytestmark = pytest.mark.django_db(transaction=True)

counts_sessions = pytest.mark.needs_a_session("the sessions on the server are the pooler's own")

jobs = Jobs()
# Beside one session for each thread: the loop's, the lease keeper's and the listener's.
OTHER_SESSIONS = 3


class Task(msgspec.Struct, frozen=True):
    name: str = ""


def ask(statement: str, *values: object) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall() if cursor.description else []


def sessions() -> int:
    count: int = ask(f"SELECT count(*) {SESSIONS}")[0][0]
    return count


@pytest.fixture
def nobody_else_is_connected(transactional_db: None) -> None:
    wait_until(lambda: not sessions(), because="the sessions of other tests are gone")


# -- sessions that are cut ----------------------------------------------------


@counts_sessions
@pytest.mark.usefixtures("nobody_else_is_connected")
@pytest.mark.parametrize("health_checks", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("max_age", [0, None], ids=["closed", "kept"])
def test_a_job_succeeds_at_its_first_attempt_after_all_sessions_of_a_worker_were_cut(
    worker, monkeypatch, max_age, health_checks
):
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age)
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", health_checks)
    attempts: list[int] = []

    @job(Task, topic="t.Task")
    def handle(request: Task, run: Run) -> None:
        attempts.append(run.attempt)
        Note.objects.create(text=request.name)

    worker(topics=["t.Task"])
    jobs.put(Task("before"))
    wait_until(lambda: not Job.objects.exists(), because="the worker has all its sessions")
    wait_until(lambda: sessions() == 1 + OTHER_SESSIONS, because="they are idle")
    assert ask(f"SELECT pg_terminate_backend(pid) {SESSIONS}") == [(True,)] * (1 + OTHER_SESSIONS)

    put = time.monotonic()
    jobs.put(Task("after"))
    wait_until(lambda: Note.objects.count() == 2, because="the job runs", within=5)
    assert time.monotonic() - put < 3.0
    wait_until(lambda: not Job.objects.exists(), because="it is done", within=5)
    assert attempts == [1, 1]
    # So does its listener. The lease keeper has nothing to renew, and so not noticed yet.
    wait_until(lambda: sessions() >= OTHER_SESSIONS, because="the sessions are back")


def test_outcomes_are_stored_though_the_sessions_are_cut_while_jobs_run(worker):
    let_go = threading.Event()
    attempts: list[int] = []

    @job(Task, topic="t.Task", workers=4)
    def handle(request: Task, run: Run) -> None:
        attempts.append(run.attempt)
        let_go.wait(30)

    worker(topics=["t.Task"])
    jobs.put_many([Task()] * 4)
    wait_until(lambda: len(attempts) == 4, because="all run")
    connection.close()
    cut_all_sessions()
    let_go.set()
    wait_until(lambda: not Job.objects.exists(), because="all are done")
    assert attempts == [1] * 4


def test_a_worker_that_could_not_read_the_table_lets_living_holders_renew_first(
    worker,
):
    started: dict[str, float] = {}

    @job(Task, topic="t.Task", lease=6)
    def handle(request: Task) -> None:
        started[request.name] = time.monotonic()

    with transaction.atomic():
        ask("LOCK TABLE myxo_jobs")
        make_job("t.Task", payload='{"name": "fresh"}')
        # Its holder cannot renew it now, as little as the worker can claim it.
        make_job("t.Task", status="running", lease_until=ago(-1), payload='{"name": "held"}')
        worker(topics=["t.Task"])
        time.sleep(4.0)
        assert started == {}
    committed = time.monotonic()

    wait_until(lambda: "fresh" in started, because="a new job is taken at once", within=2)
    wait_until(lambda: "held" in started, because="nobody has renewed the other", within=8)
    assert started["held"] - committed > 1.9  # a third of the lease


@pytest.mark.needs_a_session("one of the worker's sessions is stopped")
def test_a_worker_whose_renewals_hang_does_not_take_its_own_job_for_an_orphan(worker):
    let_go = threading.Event()
    attempts: list[int] = []

    @job(Task, topic="t.Task", workers=2, lease=1)
    def handle(request: Task, run: Run) -> None:
        attempts.append(run.attempt)
        let_go.wait(30)

    worker(topics=["t.Task"])
    jobs.put(Task())
    renewal = "SELECT pid FROM pg_stat_activity WHERE state = 'idle' AND strpos(query, %s) > 0"
    [(pid,)] = wait_until(lambda: ask(renewal, "json_to_recordset"), because="it is renewed")
    command = Path(f"/proc/{pid}/comm")
    if not command.exists() or "postgres" not in command.read_text():
        pytest.skip("the server runs on another machine")
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(2.5)
        assert attempts == [1]
    finally:
        os.kill(pid, signal.SIGCONT)
        let_go.set()
    wait_until(lambda: not Job.objects.exists(), because="it is done")
    assert attempts == [1]


# -- how many sessions --------------------------------------------------------


@counts_sessions
@pytest.mark.usefixtures("nobody_else_is_connected")
@pytest.mark.parametrize("max_age", [0, None], ids=["closed", "kept"])
def test_sessions_are_those_of_the_threads_and_three_and_none_is_left(worker, monkeypatch, max_age):
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age)

    @job(Task, topic="t.Task", workers=4)
    def handle(request: Task) -> None:
        Note.objects.create(text=request.name)

    running = worker(topics=["t.Task"])
    most = 0
    for _ in range(5):
        jobs.put_many([Task()] * 100)
        while Job.objects.exists():
            most = max(most, sessions())
    # And one for a moment at the start, which proves that wake-ups arrive.
    assert OTHER_SESSIONS < most <= 4 + OTHER_SESSIONS + 1
    idle = sessions()
    time.sleep(1.5)
    assert sessions() <= idle <= 4 + OTHER_SESSIONS
    running.stop()
    wait_until(lambda: not sessions(), because="none is left", within=3)


def with_a_pool(size: int) -> dict[str, Any]:
    """Return settings of a project that uses Django's connection pool."""
    keys = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
    pool = {"min_size": 0, "max_size": size, "max_idle": 1.0, "timeout": 20}
    database = {key: connection.settings_dict[key] for key in keys}
    return {"DATABASES": {"default": {**database, "OPTIONS": {"pool": pool}}}}


def test_a_worker_with_more_threads_than_the_pool_refuses_and_says_what_it_needs(runjobs):
    options = ("--topics", "worker.Tally", "--workers", "6")
    process = runjobs(*options, settings=with_a_pool(2), ready=False)
    assert process.wait() == 1
    assert "has at most 2 connections" in process.log()
    assert "needs 6" in process.log().split("CommandError")[1]


@counts_sessions
@pytest.mark.usefixtures("nobody_else_is_connected")
def test_a_pool_as_large_as_the_threads_serves_all_jobs_and_idle_threads_hold_none_of_it(
    runjobs, ledger
):
    notes = Note.objects.bulk_create(Note(text="one two three") for _ in range(300))
    jobs.put_many(Tally(note.pk) for note in notes)
    options = ("--topics", "worker.Tally", "--workers", "6")
    process = runjobs(*options, settings=with_a_pool(6))
    most = 0
    deadline = time.monotonic() + 60
    while Job.objects.exists():
        most = max(most, sessions())
        assert time.monotonic() < deadline, process.log()
        time.sleep(0.01)

    assert {line.attempt for line in ledger.lines("begin")} == {1}
    assert Note.objects.filter(words=3).count() == 300
    assert OTHER_SESSIONS < most <= 6 + OTHER_SESSIONS + 1
    # The pool lets go of what nobody has used for a second.
    wait_until(lambda: sessions() <= OTHER_SESSIONS, because="no thread holds any", within=20)


def test_a_suite_that_runs_a_worker_drops_its_database_without_a_warning():
    """A project's suite: one transactional test with a worker of several threads."""
    test = "tests/worker/test_atomic.py::test_many_atomic_jobs_on_one_row_each_count_once"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", test],
        cwd=ROOT,
        env={**os.environ, "MYXO_TEST_DATABASE": settings.DATABASE},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout
    assert "1 passed in" in ran.stdout
    assert "warning" not in (ran.stdout + ran.stderr).lower()
    assert "other session" not in ran.stdout + ran.stderr


# -- transactions -------------------------------------------------------------


def test_a_plain_job_holds_no_transaction_open_and_no_schema_change_up(worker):
    reading = threading.Event()
    let_go = threading.Event()

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        list(Note.objects.all())
        reading.set()
        let_go.wait(30)

    worker(topics=["t.Task"])
    jobs.put(Task())
    assert reading.wait(10)
    try:
        for _ in range(25):
            held = ask(
                f"SELECT query {SESSIONS} AND xact_start < clock_timestamp() - interval '1 second'"
            )
            assert held == []
            time.sleep(0.1)
        with transaction.atomic():
            ask("SET LOCAL lock_timeout = '1s'")
            ask("ALTER TABLE notes_note ADD COLUMN colour text")
            ask("ALTER TABLE notes_note DROP COLUMN colour")
    finally:
        let_go.set()


def test_an_atomic_job_that_lost_its_claim_rolls_back(worker, caplog):
    let_go = threading.Event()
    attempts: list[int] = []

    @job(Task, topic="t.Task", atomic=True, lease=1)
    def handle(request: Task, run: Run) -> None:
        Note.objects.create(text=f"attempt {run.attempt}")
        attempts.append(run.attempt)
        if run.attempt == 1:
            let_go.wait(30)

    worker(topics=["t.Task"])
    job_id = jobs.put(Task())
    wait_until(lambda: attempts, because="it runs")
    # As if another worker had claimed it, and then died itself.
    Job.objects.filter(pk=job_id).update(worker="another worker's claim")
    let_go.set()
    wait_until(lambda: not Job.objects.exists(), because="it runs again", within=15)
    assert attempts == [1, 2]
    assert list(Note.objects.values_list("text", flat=True)) == ["attempt 2"]
    assert "its work is rolled back" in caplog.text


def test_an_atomic_job_is_read_committed_whatever_the_default_of_the_connection(
    worker, monkeypatch
):
    levels: list[str] = []

    @job(Task, topic="t.Task", atomic=True)
    def handle(request: Task) -> None:
        levels.append(ask("SHOW transaction_isolation")[0][0])

    @job(Plain, topic="t.Plain")
    def plain(request: Plain) -> None:
        with transaction.atomic():
            levels.append(ask("SHOW transaction_isolation")[0][0])

    level = psycopg.IsolationLevel.SERIALIZABLE
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "isolation_level", level)
    worker(topics=["t.Task"])
    jobs.put(Task())
    wait_until(lambda: len(levels) == 1, because="the atomic one runs")
    worker(topics=["t.Plain"])
    jobs.put(Plain())
    wait_until(lambda: len(levels) == 2, because="the plain one runs")
    assert levels == ["read committed", "serializable"]


class Plain(msgspec.Struct, frozen=True):
    name: str = ""


@pytest.mark.parametrize("raise_errors", [False, True])
def test_a_suite_hears_of_a_failed_statement_that_a_handler_swallowed(raise_errors):
    @job(Task, topic="t.Task", attempts=2, backoff=0)
    def handle(request: Task) -> None:
        Note.objects.create(text="goes with it")
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT nonsense")

    with transaction.atomic():
        job_id = jobs.put(Task())
        if raise_errors:
            with pytest.raises(DatabaseError, match="aborted"):
                run_jobs()
        else:
            assert run_jobs(raise_errors=False, delayed=True) == 2
        assert not Note.objects.exists()  # and the test's transaction goes on
        row = Job.objects.get(pk=job_id)
    if raise_errors:
        assert (row.status, row.attempts, row.error) == ("pending", 0, "")
    else:
        assert (row.status, row.attempts) == ("failed", 2)
        assert "aborted" in row.error


@pytest.mark.needs_a_session("what a handler sets in its session stays in one of the pooler's")
def test_a_setting_of_the_session_does_not_reach_the_next_job(worker):
    seen: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        seen.append(ask("SHOW statement_timeout")[0][0])
        if request.name == "set":
            ask("SET statement_timeout = '17s'")
        elif request.name == "set_config":
            ask("SELECT set_config('statement_timeout', '18s', false)")

    worker(topics=["t.Task"])
    jobs.put_many([Task("set"), Task("set_config"), Task("looks")])
    wait_until(lambda: not Job.objects.exists(), because="all ran")
    assert seen == ["0", "0", "0"]


def test_a_row_that_somebody_has_locked_holds_up_nothing_else(worker):
    let_go = threading.Event()
    ended: list[str] = []

    @job(Task, topic="t.Task", workers=2, lease=1)
    def handle(request: Task) -> None:
        if request.name == "locked":
            let_go.wait(30)
        ended.append(request.name)

    worker(topics=["t.Task"])
    locked = jobs.put(Task("locked"))
    wait_until(lambda: Job.objects.get(pk=locked).status == "running", because="it runs")
    with transaction.atomic():
        Job.objects.select_for_update().get(pk=locked)
        let_go.set()
        wait_until(lambda: ended == ["locked"], because="it ends")
        for _ in range(20):
            jobs.put(Task("free"), tx=None)
        others = Job.objects.exclude(pk=locked)
        wait_until(lambda: len(ended) == 21, because="the others run", within=5)
        wait_until(lambda: not others.exists(), because="and are stored", within=5)
        time.sleep(1.5)  # longer than the lease of the locked row
        assert Job.objects.get(pk=locked).status == "running"
    wait_until(lambda: not Job.objects.exists(), because="its outcome is stored", within=5)
    assert ended.count("locked") == 1


def test_jobs_whose_rows_are_locked_beyond_their_lease_are_not_run_twice_by_their_own_worker(
    worker,
):
    count = 12
    attempts: list[int] = []

    @job(Task, topic="t.Task", workers=count, lease=1)
    def handle(request: Task, run: Run) -> None:
        attempts.append(run.attempt)
        time.sleep(0.5)

    def hold(other: psycopg.Connection[Any], job_id: int, seconds: float) -> None:
        with other.transaction():
            locked = other.execute("SELECT FROM myxo_jobs WHERE id = %s FOR UPDATE", [job_id])
            assert locked.rowcount == 1
            time.sleep(seconds)

    with ExitStack() as stack:
        others = [stack.enter_context(connected_to_the_server()).connection for _ in range(count)]
        running = worker(topics=["t.Task"], poll=0.02)
        jobs.put_many([Task()] * count)
        wait_until(lambda: len(attempts) == count, because="all run")
        ids = enumerate(Job.objects.values_list("pk", flat=True))
        # Let go at moments at which the worker may as well be about to claim as to store.
        in_threads(
            *[partial(hold, others[place], job_id, 2.0 + 0.03 * place) for place, job_id in ids]
        )
    wait_until(lambda: not Job.objects.exists(), because="their outcomes are stored", within=5)
    running.stop()
    assert attempts == [1] * count


# -- rows that somebody wrote -------------------------------------------------


@pytest.mark.parametrize(
    "absurd",
    [
        "attempts = 2147483647",
        "created_at = '-infinity'",
        "created_at = 'infinity'",
        "due = '-infinity'",
        "created_at = '294276-12-31'",
        "created_at = '4713-01-01 BC'",
    ],
)
def test_an_absurd_value_in_a_row_stops_neither_its_topic_nor_others(worker, absurd):
    ran: list[str] = []

    @job(Task, topic="t.Task", backoff=0)
    def handle(request: Task, run: Run) -> None:
        ran.append(request.name)

    @job(Plain, topic="t.Plain")
    def plain(request: Plain) -> None:
        ran.append(request.name)

    job_id = jobs.put(Task("absurd"))
    ask(f"UPDATE myxo_jobs SET {absurd} WHERE id = %s", job_id)
    jobs.put(Task("next"))
    jobs.put(Plain("other"))
    running = worker(topics=["t.Task", "t.Plain"])
    wait_until(lambda: {"next", "other"} <= set(ran), because="the others run", within=5)
    wait_until(
        lambda: not Job.objects.filter(pk=job_id, failed=False).exists(), because="it has ended"
    )
    running.stop()


def test_a_topic_whose_claims_the_database_refuses_does_not_stop_the_others(
    worker, monkeypatch, caplog
):
    monkeypatch.setattr("myxo_jobs.worker.worker.BROKEN_LANE_SECONDS", 1.0)
    ran: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        ran.append(request.name)

    @job(Plain, topic="t.Plain")
    def plain(request: Plain) -> None:
        ran.append(request.name)

    ask("ALTER TABLE myxo_jobs ADD CONSTRAINT no_claim CHECK (topic <> 't.Task' OR worker = '')")
    try:
        jobs.put(Task("refused"))
        began = time.monotonic()
        worker(topics=["t.Task", "t.Plain"])
        for number in range(5):
            jobs.put(Plain(str(number)))
            wait_until(lambda: str(number) in ran, because="the others run", within=2)  # noqa: B023
            time.sleep(0.3)
        told = [one for one in caplog.records if "topic=t.Task cannot" in one.getMessage()]
        assert 1 <= len(told) <= 1 + time.monotonic() - began
    finally:
        ask("ALTER TABLE myxo_jobs DROP CONSTRAINT no_claim")
    wait_until(lambda: "refused" in ran, because="it is tried again", within=5)
    assert {record.levelname for record in told} == {"ERROR"}
    assert "cannot reach the database" not in caplog.text


# -- what an idle worker asks -------------------------------------------------


@counts_sessions
@pytest.mark.usefixtures("nobody_else_is_connected")
def test_an_idle_worker_makes_two_statements_a_second_at_most(worker):
    worker()
    time.sleep(2.5)
    seconds = 5.0
    # Each session shows its last statement; asked so often, none of them escapes.
    statement = f"SELECT pid, query_start {SESSIONS}"
    before = set(ask(statement))
    seen: set[tuple[Any, ...]] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen |= set(ask(statement))
        time.sleep(0.01)
    assert 0 < len(seen - before) <= 2 * seconds
