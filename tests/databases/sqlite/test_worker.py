"""A worker beside a site, in one SQLite file."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.db import connection, transaction

from myxo_jobs import job
from tests.app.models import Note
from tests.ledger import Ledger
from tests.rig import ROOT, Process, ago, make_job, process_environment, wait_until


class Task(msgspec.Struct, frozen=True):
    name: str


class Project:
    """A project of its own whose database has Django's default settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "project.sqlite3"
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(self.file)}
        self.environment = process_environment(settings={"DATABASES": {"default": database}})
        self.processes: list[Process] = []

    def run(self, *arguments: str) -> Process:
        log = self.folder / f"process-{len(self.processes)}.log"
        process = Process([sys.executable, "-m", *arguments], log, self.environment)
        self.processes.append(process)
        return process

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        file = sqlite3.connect(self.file, timeout=20)
        try:
            with file:
                return file.execute(statement).fetchall()
        finally:
            file.close()


@pytest.fixture
def project(tmp_path: Path, ledger: Ledger) -> Iterator[Project]:
    # In memory where there is such a folder: a drive that others keep busy makes commits
    # wait for seconds, which says nothing about locks.
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path))
    project = Project(folder)
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"],
        cwd=ROOT,
        env=project.environment,
        check=True,
    )
    yield project
    for process in project.processes:
        process.end()
    shutil.rmtree(folder)


def test_workers_and_a_steady_writer_share_a_file_with_the_default_settings(project, ledger):
    assert project.sql("PRAGMA journal_mode") == [("delete",)]
    project.sql(
        "insert into myxo_jobs (topic, payload) values "
        """('worker.Slow', '{"name": "long", "seconds": 10}')"""
    )
    workers = [
        project.run("django", "runjobs", "--topics", "worker.Tally,worker.Slow") for _ in range(2)
    ]
    for worker in workers:
        worker.wait_for_log("started")
    site = project.run("tests.worker.site", "10")
    assert site.wait(within=60) == 0
    told = json.loads(site.log().splitlines()[-1])
    wait_until(
        lambda: project.sql("select count(*) from myxo_jobs") == [(0,)],
        because="all is done",
        within=30,
    )

    assert told["errors"] == []
    assert told["put"] > 100
    took = sorted(told["took"])
    assert took[int(len(took) * 0.99)] < 1.0, took[-10:]
    begun = Counter(line.name for line in ledger.lines("begin"))
    assert len(begun) == told["put"] + 1
    assert set(begun.values()) == {1}
    assert ledger.count("end", name="long") == 1
    assert project.sql("select count(*) from notes_note where words = 3") == [(told["put"],)]
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert worker.wait(within=10) == 0
        assert "cannot reach the database" not in worker.log()
        assert "Traceback" not in worker.log()


@pytest.mark.django_db(transaction=True)
def test_an_idle_worker_writes_nothing_to_the_file(worker: Callable[..., Any]):
    worker()
    time.sleep(1.0)

    def contents() -> dict[str, str]:
        name = Path(connection.settings_dict["NAME"])
        files = (name, name.with_name(name.name + "-wal"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    with connection.cursor() as cursor:
        before, version = contents(), cursor.execute("PRAGMA data_version").fetchone()
        time.sleep(3.0)
        assert contents() == before
        assert cursor.execute("PRAGMA data_version").fetchone() == version


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_could_not_write_to_the_file_lets_living_holders_renew_first(
    worker,
):
    started: dict[str, float] = {}

    @job(Task, topic="t.Task", lease=6)
    def handle(request: Task) -> None:
        started[request.name] = time.monotonic()

    with transaction.atomic():
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


@pytest.mark.django_db(transaction=True)
def test_an_idle_worker_lets_living_holders_renew_first_after_anothers_write(worker):
    started: list[float] = []

    @job(Task, topic="t.Task", lease=6)
    def handle(request: Task) -> None:
        started.append(time.monotonic())

    worker(topics=["t.Task"])
    time.sleep(3.0)  # so long that the worker cannot know whether others could write
    make_job("t.Task", status="running", lease_until=ago(-1))
    with transaction.atomic():
        time.sleep(2.5)  # its holder could not renew it meanwhile; the worker waits, too
        assert started == []
    committed = time.monotonic()
    wait_until(lambda: started, because="nobody has renewed it", within=5)
    assert started[0] - committed > 0.3


def write_mebibytes(count: int) -> None:
    """Write so much into the write-ahead log, and next to nothing into the file."""
    note, _ = Note.objects.get_or_create(pk=1)
    for number in range(count):
        Note.objects.filter(pk=note.pk).update(text=str(number % 10) * 2**20)


@pytest.mark.django_db(transaction=True)
def test_a_reader_beside_whom_the_log_grows_is_warned_of_once(worker, monkeypatch, caplog):
    file = connection.settings_dict["NAME"]
    monkeypatch.setattr("myxo_jobs.worker.worker.COMPLAINT_EVERY_SECONDS", 0.5)

    def warnings() -> list[str]:
        return [line for line in caplog.messages if " warns of the database: " in line]

    worker(topics=["worker.Tiny"])
    write_mebibytes(60)  # without a reader it is started over
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM notes_note").fetchall()
        time.sleep(2.5)
        assert warnings() == []
        write_mebibytes(60)
        wait_until(warnings, because="it warns of the reader", within=15)
        write_mebibytes(20)
        time.sleep(2.5)

    (told,) = warnings()
    assert f"{file}-wal has grown to " in told
    assert f"`lsof {file}`" in told
