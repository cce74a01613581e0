"""Faults of an SQLite file: other writers, other readers."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from django.db import OperationalError, connection, transaction

from myxo_jobs import Jobs
from tests.chaos.jobs import LEASE, Echo, Once
from tests.chaos.rig import SQLITE, Rig, mixed_work
from tests.chaos.scenario import scenario


def _open() -> sqlite3.Connection:
    return sqlite3.connect(str(connection.settings_dict["NAME"]), isolation_level=None, timeout=20)


@scenario("F50", "a foreign writer that holds the file's lock for longer than a lease", (SQLITE,))
def a_writer_holds_the_lock(rig: Rig) -> None:
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    longest = min(max(rig.seconds / 4, 5.0), 18.0)
    with closing(_open()) as other:
        for _ in rig.moments(0.5, 1.5):
            other.execute("BEGIN IMMEDIATE")
            time.sleep(rig.random.uniform(LEASE, longest))
            other.execute("COMMIT")
            rig.bite()
            rig.measure_recovery(time.monotonic(), 5.0, "the lock")


@scenario("F51", "puts in deferred transactions that began with a read, beside writers", (SQLITE,))
def callers_read_before_they_put(rig: Rig) -> None:
    rig.start_workers()
    rig.put_steadily()
    rig.warm_up()
    rig.bites = 0
    connection.ensure_connection()
    connection.transaction_mode = None  # type: ignore[attr-defined]
    from myxo_jobs.models import Job

    for _ in rig.moments(0.02, 0.1):
        request = Once(rig.oracle.number())
        try:
            with transaction.atomic():
                Job.objects.filter(pk=0).exists()
                time.sleep(0.03)
                Jobs().put(request)
        except OperationalError:
            rig.bite()
            there = Job.objects.filter(topic="chaos.Once", payload__contains=f":{request.number},")
            rig.expect(not there.exists(), "a refused put has left a row")


@scenario("F52", "a long reader, beside which the write-ahead log grows", (SQLITE,))
def a_reader_stays(rig: Rig) -> None:
    trees = [rig.start_workers(), rig.start_workers(processes=2)]
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    log = Path(f"{connection.settings_dict['NAME']}-wal")
    with closing(_open()) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM myxo_jobs").fetchone()
        before = log.stat().st_size
        for _ in rig.moments(0.2, 0.4):
            for _ in range(3):
                rig.oracle.put(Echo(rig.oracle.number(), "x" * 1_000_000))
            rig.measure_recovery(time.monotonic(), 2.0, "a look")
        rig.bites = (log.stat().st_size - before) // 4096
    for tree in trees:
        told = tree.log().count(" warns of the database: ")
        rig.expect(0 < told <= tree.processes, f"{told} warnings of a log that has grown")
