"""What only a SQLite file does: one writer at a time, and a version that moves."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TestCase

from myxo_jobs import Jobs, OwnTransactionImpossible
from myxo_jobs.databases import database_of, sqlite
from myxo_jobs.databases.file_notices import FileNotices
from myxo_jobs.models import Job
from tests.app.jobs import Work
from tests.app.models import Note
from tests.rig import ago, in_threads, wait_until

jobs = Jobs()
pytestmark = pytest.mark.django_db(databases=["default", "other"], transaction=True)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has inotify")


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


def no_notices(files: Iterable[Path]) -> FileNotices:
    raise OSError("no more of them")


@pytest.fixture(params=["told by the system", "by looking"])
def listener(request, monkeypatch):
    if request.param == "by looking":
        monkeypatch.setattr(sqlite, "FileNotices", no_notices)
    listener = database_of("default").listen("default")
    assert (listener._notices is None) == (request.param == "by looking")
    yield listener
    listener.close()


def test_a_listener_sees_the_commit_of_another_connection(listener):
    assert listener.wait(0.1) == set()
    in_threads(lambda: jobs.put(Work("w")))
    assert listener.wait(5) is None
    assert listener.wait(0.1) == set()
    with transaction.atomic():
        jobs.put(Work("w"))
        assert listener.wait(0.1) == set()
    assert listener.wait(5) is None


def test_a_listener_learns_of_a_write_without_waiting_for_its_time_to_end(listener):
    assert listener.wait(0.5) == set()
    written = threading.Timer(0.2, in_threads, [lambda: jobs.put(Work("w"))])
    written.start()
    began = time.monotonic()
    assert listener.wait(20) is None
    assert time.monotonic() - began < 10
    written.join()


@pytest.mark.parametrize("flush", [0.03, 0.4])
def test_a_listener_sees_a_write_that_can_be_read_long_after_the_system_told_of_it(
    listener, monkeypatch, flush
):
    """On a slow drive, also where a wait ends between the two."""
    look, written = sqlite._data_version, time.monotonic()
    old = look(listener._connection)
    monkeypatch.setattr(
        sqlite,
        "_data_version",
        lambda asked: look(asked) if time.monotonic() > written + flush else old,
    )
    in_threads(lambda: jobs.put(Work("w")))

    while listener.wait(0.3) is not None:
        assert time.monotonic() < written + flush + 10
    assert time.monotonic() > written + flush


@on_linux
def test_what_is_written_tells_of_itself_in_each_journal_mode_and_what_is_read_does_not(tmp_path):
    project = sqlite3.connect(tmp_path / "db.sqlite3", isolation_level=None)
    project.execute("CREATE TABLE words (word)")
    notices = FileNotices([tmp_path / "db.sqlite3", tmp_path / "db.sqlite3-wal"])
    try:
        for mode in ("delete", "wal", "delete"):
            project.execute(f"PRAGMA journal_mode = {mode}")
            project.execute("INSERT INTO words VALUES ('one')")
            while notices.wait(0.01):
                pass
            assert project.execute("SELECT * FROM words").fetchall()
            assert not notices.wait(0.1)
            project.execute("INSERT INTO words VALUES ('another')")
            assert notices.wait(5)
    finally:
        notices.close()
        project.close()


@on_linux
def test_no_notices_are_promised_of_files_that_are_not_there(tmp_path):
    before = notice_descriptors()
    with pytest.raises(OSError, match="no file to watch"):
        FileNotices([tmp_path / "none", tmp_path / "none-wal"])
    assert notice_descriptors() == before


def test_no_notices_are_promised_of_a_database_in_memory(monkeypatch):
    monkeypatch.setitem(connections["other"].settings_dict, "NAME", "file:other?mode=memory")
    own = database_of("other").open("other")
    try:
        assert sqlite._notices_of(own) is None
    finally:
        own.connection.close()  # Django's wrapper keeps a database in memory open


def notice_descriptors() -> int:
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("inotify" in str(link) for link in links)


@on_linux
def test_a_worker_that_stopped_has_no_notices_left(worker):
    before = notice_descriptors()
    one = worker()
    wait_until(lambda: notice_descriptors() > before, because="it listens")
    one.stop()
    assert notice_descriptors() == before


@pytest.mark.parametrize("cache_pages", [None, 1])
def test_beside_steady_writers_a_listener_looks_no_oftener_than_without_notices(
    listener, monkeypatch, cache_pages
):
    """Neither when each write is a transaction nor when all are one that outgrows its cache."""
    looks = []
    look = sqlite._data_version
    monkeypatch.setattr(sqlite, "_data_version", lambda asked: looks.append(1) or look(asked))
    ends = time.monotonic() + 2

    def write() -> None:
        if cache_pages is not None:
            with connection.cursor() as cursor:
                cursor.execute(f"PRAGMA cache_size = {cache_pages}")
        with transaction.atomic() if cache_pages else nullcontext():
            while time.monotonic() < ends:
                Note.objects.create(text="again " * 1_000)

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


def test_the_loop_lets_others_write_after_its_own_writes(worker, ledger, monkeypatch):
    told: list[float] = []
    let = sqlite.SQLite.let_others_write

    def noted(self: sqlite.SQLite, own: BaseDatabaseWrapper, seconds: float) -> None:
        told.append(seconds)
        let(self, own, seconds)

    monkeypatch.setattr(sqlite.SQLite, "let_others_write", noted)
    jobs.put_many(Work("w") for _ in range(50))
    worker()
    wait_until(lambda: not Job.objects.exists(), because="all have run")
    assert told
    assert min(told) > 0
