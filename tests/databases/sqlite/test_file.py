"""What only a SQLite file does: one writer at a time, and a version that moves."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import TestCase

from myxo_jobs import Jobs, OwnTransactionImpossible
from myxo_jobs.databases import database_of, sqlite
from myxo_jobs.databases.file_notices import FileNotices
from myxo_jobs.models import Job
from tests.app.jobs import Work
from tests.app.models import Note
from tests.rig import ago, in_threads

jobs = Jobs()
pytestmark = pytest.mark.django_db(transaction=True)


def test_a_put_of_its_own_transaction_inside_one_is_refused_at_once():
    began = time.monotonic()
    with transaction.atomic():
        with pytest.raises(OwnTransactionImpossible, match="wait for that transaction"):
            jobs.put(Work("own"), tx=None)
        Note.objects.create(text="the transaction goes on")
    assert time.monotonic() - began < 1
    assert (Job.objects.count(), Note.objects.count()) == (0, 1)


def test_a_put_of_its_own_transaction_with_autocommit_off_is_refused_at_once():
    connection.set_autocommit(False)
    try:
        with pytest.raises(OwnTransactionImpossible):
            jobs.put(Work("own"), tx=None)
        connection.rollback()
    finally:
        connection.set_autocommit(True)


class InTestCase(TestCase):
    def test_inside_a_block_of_the_code_under_test_it_is_refused_as_in_life(self) -> None:
        with transaction.atomic(), pytest.raises(OwnTransactionImpossible):
            jobs.put(Work("own"), tx=None)

    def test_there_is_no_wake_up_to_send(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            jobs.put(Work("w"))
            jobs.put_many([Work("w")])
        assert callbacks == []


@pytest.fixture
def written_elsewhere():
    """Hold the file's write lock in another thread: `written_elsewhere(seconds)`."""
    threads: list[threading.Thread] = []

    def hold(seconds: float) -> None:
        locked = threading.Event()

        def write() -> None:
            with transaction.atomic():
                Note.objects.create(text="a slow writer")
                locked.set()
                time.sleep(seconds)
            connections.close_all()

        threads.append(threading.Thread(target=write))
        threads[-1].start()
        assert locked.wait(10)

    yield hold
    for thread in threads:
        thread.join()


def test_a_put_waits_for_another_writer(written_elsewhere):
    written_elsewhere(0.5)
    began = time.monotonic()

    assert jobs.put(Work("patient"))
    assert time.monotonic() - began > 0.3


def test_a_put_that_waits_longer_than_the_project_allows_raises_and_puts_nothing(
    written_elsewhere,
):
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 100")
    try:
        written_elsewhere(1.0)
        with pytest.raises(OperationalError, match="locked"):
            jobs.put(Work("impatient"))
    finally:
        connection.close()
    assert not Job.objects.exists()


def test_a_claim_waits_for_another_writer(make_job, claim_one, written_elsewhere):
    make_job("receipts")
    written_elsewhere(0.5)

    assert claim_one("receipts").attempt == 1


@pytest.fixture(params=["told by the system", "by looking"])
def listener(request, monkeypatch):
    if request.param == "by looking":
        monkeypatch.setattr(sqlite, "FileNotices", no_notices)
    listener = database_of("default").listen("default")
    yield listener
    listener.close()


def no_notices(files: Iterable[Path]) -> FileNotices:
    raise OSError("no more of them")


def test_a_listener_sees_the_commit_of_another_connection(listener):
    assert listener.wait(0.1) == set()
    in_threads(lambda: jobs.put(Work("w")))
    assert listener.wait(5) is None
    assert listener.wait(0.1) == set()
    with transaction.atomic():
        jobs.put(Work("w"))
        assert listener.wait(0.1) == set()
    assert listener.wait(5) is None


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_listener_sees_a_commit_whose_flush_takes_as_long(listener, written_elsewhere, seconds):
    assert listener.wait(0.1) == set()
    written_elsewhere(seconds)
    assert listener.wait(5) is None


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_listener_sees_commits_to_a_file_that_turns_to_another_journal_mode(tmp_path, mode):
    project = sqlite3.connect(tmp_path / "db.sqlite3", isolation_level=None)
    project.execute("CREATE TABLE words (word)")
    notices = FileNotices([tmp_path / "db.sqlite3", tmp_path / "db.sqlite3-wal"])
    try:
        assert not notices.wait(0.01)
        project.execute(f"PRAGMA journal_mode = {mode}")
        while notices.wait(0.01):
            pass
        project.execute("SELECT * FROM words").fetchall()
        assert not notices.wait(0.1)
        project.execute("INSERT INTO words VALUES ('one')")
        assert notices.wait(5)
    finally:
        notices.close()
        project.close()


def test_no_notices_are_promised_of_files_that_are_not_there(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="inotify_add_watch"):
        FileNotices([tmp_path / "none", tmp_path / "none-wal"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_beside_steady_writers_a_listener_looks_no_oftener_than_without_notices(
    listener, monkeypatch
):
    looks = []
    look = sqlite._data_version
    monkeypatch.setattr(sqlite, "_data_version", lambda asked: looks.append(1) or look(asked))
    ends = time.monotonic() + 2

    def write() -> None:
        while time.monotonic() < ends:
            Note.objects.create(text="again")

    def listen() -> None:
        while time.monotonic() < ends:
            listener.wait(0.3)

    in_threads(write, listen)
    assert 20 < len(looks) < 2 * 2 / sqlite.LOOK_SECONDS


def test_the_worker_s_own_connection_does_not_wait_for_the_drive_and_ours_does_as_set():
    own = database_of("default").open("default")
    try:
        with own.cursor() as cursor:
            assert cursor.execute("PRAGMA synchronous").fetchone()[0] == 1
            assert cursor.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    finally:
        own.close()


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_without_wal_the_worker_s_own_connection_keeps_the_project_s_setting(monkeypatch, tmp_path):
    """NORMAL may corrupt a file in another journal mode, so FULL stays."""
    settings = connections["other"].settings_dict
    monkeypatch.setitem(settings, "NAME", str(tmp_path / "other.sqlite3"))
    monkeypatch.setitem(settings, "OPTIONS", {})
    own = database_of("other").open("other")
    try:
        with own.cursor() as cursor:
            assert cursor.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
            assert cursor.execute("PRAGMA synchronous").fetchone()[0] == 2
    finally:
        own.close()


def test_a_claim_that_stops_before_a_suspect_proves_that_the_file_can_be_written(
    make_job, claim_some
):
    make_job("receipts", status="expired", due=ago(500))
    with connection.cursor() as cursor:
        before = cursor.execute("SELECT total_changes()").fetchone()[0]
        assert claim_some("receipts", on_suspect="stop") == []
        assert cursor.execute("SELECT total_changes()").fetchone()[0] == before + 1


def test_after_a_write_the_loop_leaves_others_more_room_while_they_write():
    database, took = database_of("default"), 0.03
    own = database.open("default")

    def rested() -> float:
        began = time.monotonic()
        database.let_others_write(own, took)
        return time.monotonic() - began

    try:
        alone = min(rested() for _ in range(5))
        in_threads(lambda: Note.objects.create(text="another's"))
        beside = min(rested() for _ in range(5))
    finally:
        own.close()

    assert took * sqlite.SHARE_ALONE <= alone < took * sqlite.SHARE_BESIDE_OTHERS
    assert beside >= took * sqlite.SHARE_BESIDE_OTHERS


def test_own_writes_are_no_reason_to_leave_others_more_room(make_job):
    database = database_of("default")
    own = database.open("default")
    try:
        others = sqlite.Others(sqlite._data_version(own))
        with own.cursor() as cursor:
            cursor.execute("UPDATE myxo_jobs SET priority = 1")
        others.note(sqlite._data_version(own))
        assert not others.write
        make_job("receipts")
        others.note(sqlite._data_version(own))
        assert others.write
    finally:
        own.close()
