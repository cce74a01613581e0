"""The raw limit: the bare statements on a copy of the product's table, and nothing around them.

Puts go through the cursor of a Django connection, as ours do; claims and deletions
through the driver alone. The statements are written out here, so that a slower one of
the product's is not taken for the limit.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.db import connection, transaction  # noqa: E402

from tests.benchmarks.actor import Cue  # noqa: E402
from tests.benchmarks.jobs import NOTES, update_by_orm  # noqa: E402

BATCH = 500
REFERENCE_POLL_SECONDS = 0.02
TOPIC = "benchmark.noop"

POSTGRES_INSERT = (
    "INSERT INTO raw_jobs (topic, payload, key, priority, due) "
    "VALUES (%s, %s, %s, %s, statement_timestamp()) "
    "ON CONFLICT (key) WHERE due IS NOT NULL AND key IS NOT NULL DO NOTHING RETURNING id"
)
POSTGRES_INSERT_MANY = (
    "INSERT INTO raw_jobs (topic, payload, key, priority, due) "
    "SELECT topic, payload, key, priority, statement_timestamp() "
    "FROM unnest(%s::text[], %s::text[], %s::text[], %s::smallint[]) "
    "AS given(topic, payload, key, priority)"
)
POSTGRES_CLAIM = """
    UPDATE raw_jobs SET worker = 'raw', lease_until = now() + interval '30 s',
        attempts = attempts + 1, started_at = now()
    WHERE id = ANY (ARRAY(
        SELECT id FROM raw_jobs WHERE topic = %s AND NOT failed AND due IS NOT NULL
            AND due <= now() AND (lease_until IS NULL OR lease_until <= now())
        ORDER BY priority DESC, due, id LIMIT %s FOR UPDATE SKIP LOCKED))
    RETURNING id, payload"""
POSTGRES_DELETE_MANY = "DELETE FROM raw_jobs WHERE id = ANY (%s) AND worker = 'raw'"

SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
SQLITE_INSERT = (
    "INSERT INTO raw_jobs (topic, payload, key, priority, due) VALUES (%s, %s, %s, %s, "
    "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) "
    "ON CONFLICT (key) WHERE due IS NOT NULL AND key IS NOT NULL DO NOTHING RETURNING id"
)
SQLITE_CLAIM = f"""
    UPDATE raw_jobs SET worker = 'raw', attempts = attempts + 1,
        lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', '30 seconds'),
        started_at = {SQLITE_NOW}
    WHERE id IN (
        SELECT id FROM raw_jobs WHERE topic = ? AND NOT failed AND failed = 0
            AND due IS NOT NULL AND due <= {SQLITE_NOW} AND lease_until IS NULL
        ORDER BY priority DESC, due, id LIMIT ?)
    RETURNING id, payload"""
SQLITE_DELETE = "DELETE FROM raw_jobs WHERE id = ? AND worker = 'raw'"

UPDATE_NOTE = "UPDATE notes_note SET words = {mark} WHERE id = {mark}"


def is_postgres() -> bool:
    return bool(settings.DATABASE == "postgres")


def inserting() -> Callable[[int], object]:
    """Return what inserts one job in the connection's transaction."""
    statement = POSTGRES_INSERT if is_postgres() else SQLITE_INSERT
    connection.ensure_connection()

    def insert(number: int) -> object:
        with connection.cursor() as cursor:
            cursor.execute(statement, ["benchmark.unserved", f'{{"number":{number}}}', None, 0])
            return cursor.fetchall()

    return insert


def fill(count: int) -> None:
    """Fill the copy with the jobs that are in the product's table."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO raw_jobs (topic, payload, priority, due) "
            "SELECT topic, payload, priority, due FROM myxo_jobs ORDER BY id"
        )
        assert cursor.rowcount == count
        if is_postgres():
            # As autovacuum does after a while: without it the plans are no limit.
            cursor.execute("ANALYZE raw_jobs")


def put(cue: Cue, seconds: float) -> dict[str, float]:
    """Insert one job after the other, each in a transaction of its own."""
    insert = inserting()
    insert(0)
    cue.ready()
    began = now = time.monotonic()
    count = 0
    while now - began < seconds:
        insert(count)
        count += 1
        now = time.monotonic()
    return {"count": count, "seconds": now - began}


def put_all(cue: Cue, first: int, count: int) -> dict[str, float]:
    """Insert so many jobs as quickly as it goes; return when it began and ended."""
    insert = inserting()
    cue.ready()
    began = time.monotonic()
    for number in range(first, first + count):
        insert(number)
    return {"began": began, "ended": time.monotonic()}


def put_many(cue: Cue, count: int, times: int) -> dict[str, float]:
    """Insert so many jobs at once, a few times, from values that are there already."""
    rows = [("benchmark.unserved", f'{{"number":{number}}}', None, 0) for number in range(count)]
    insert = _insert_many_postgres if is_postgres() else _insert_many_sqlite
    connection.ensure_connection()
    values: Any = [list(column) for column in zip(*rows, strict=True)] if is_postgres() else rows
    cue.ready()
    began = time.monotonic()
    for _ in range(times):
        with transaction.atomic(), connection.cursor() as cursor:
            insert(cursor, values)
    return {"count": count * times, "seconds": time.monotonic() - began}


def _insert_many_postgres(cursor: Any, columns: list[list[Any]]) -> None:
    cursor.execute(POSTGRES_INSERT_MANY, columns)


def _insert_many_sqlite(cursor: Any, rows: list[tuple[Any, ...]]) -> None:
    cursor.executemany(SQLITE_INSERT.partition(" RETURNING")[0], rows)


def drain(cue: Cue, count: int) -> dict[str, Any]:
    """Claim and delete in batches of 500."""
    connection.ensure_connection()
    raw = connection.connection
    empty_it = _drain_postgres if is_postgres() else _drain_sqlite
    cue.ready()
    began, cpu = time.monotonic(), time.process_time()
    emptied = empty_it(raw)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    assert emptied == count, f"{emptied} of {count} were there"
    return {"seconds": seconds, "cpu": cpu}


def _drain_postgres(raw: Any) -> int:
    raw.execute("SET synchronous_commit = off")
    emptied = 0
    while rows := raw.execute(POSTGRES_CLAIM, (TOPIC, BATCH)).fetchall():
        raw.execute(POSTGRES_DELETE_MANY, ([row[0] for row in rows],))
        emptied += len(rows)
    return emptied


def _drain_sqlite(raw: Any) -> int:
    raw.execute("PRAGMA synchronous = NORMAL")
    emptied = 0
    while rows := raw.execute(SQLITE_CLAIM, (TOPIC, BATCH)).fetchall():
        raw.execute("BEGIN IMMEDIATE")
        raw.executemany(SQLITE_DELETE, [row[:1] for row in rows])
        raw.execute("COMMIT")
        emptied += len(rows)
    return emptied


def drain_orm(cue: Cue, count: int) -> dict[str, Any]:
    """Only do the ORM updates, in a bare loop."""
    connection.ensure_connection()
    cue.ready()
    began, cpu = time.monotonic(), time.process_time()
    for number in range(count):
        update_by_orm(number)
    return {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}


def drain_atomic(cue: Cue, count: int) -> dict[str, Any]:
    """Begin, update a note, delete a job, commit: for each of them, through the driver."""
    connection.ensure_connection()
    raw = connection.connection
    ids = [row[0] for row in raw.execute("SELECT id FROM raw_jobs ORDER BY id").fetchall()]
    assert len(ids) == count
    mark = "%s" if is_postgres() else "?"
    statements = (UPDATE_NOTE.format(mark=mark), f"DELETE FROM raw_jobs WHERE id = {mark}")
    begin = "BEGIN" if is_postgres() else "BEGIN IMMEDIATE"
    cue.ready()
    began, cpu = time.monotonic(), time.process_time()
    for number, job_id in enumerate(ids):
        _in_one_transaction(raw, begin, statements, number, job_id)
    return {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}


def _in_one_transaction(
    raw: Any, begin: str, statements: Sequence[str], number: int, job_id: int
) -> None:
    update, delete = statements
    raw.execute(begin)
    raw.execute(update, (number, number % NOTES + 1))
    raw.execute(delete, (job_id,))
    raw.execute("COMMIT")


def work_sqlite(cue: Cue, topics: list[str]) -> dict[str, Any]:
    """Claim one job, note its run, delete it: with a flush at each step, until told to stop.

    What a worker does that knows nothing of batches: the reference beside other writers.
    """
    connection.ensure_connection()
    raw = connection.connection
    stop = threading.Event()
    threading.Thread(target=lambda: (cue.ready(), cue.wait_for_word(), stop.set())).start()
    claim = SQLITE_CLAIM.replace("raw_jobs", "myxo_jobs")
    delete = SQLITE_DELETE.replace("raw_jobs", "myxo_jobs")
    moments, errors = [], 0
    while not stop.is_set():
        try:
            rows = raw.execute(claim, (topics[0], 1)).fetchall()
            if not rows:
                time.sleep(REFERENCE_POLL_SECONDS)
                continue
            job_id, payload = rows[0]
            moments.append((json.loads(payload)["number"], time.monotonic()))
            raw.execute(delete, (job_id,))
        except sqlite3.OperationalError:
            errors += 1
    return {"moments": moments, "errors": errors}
