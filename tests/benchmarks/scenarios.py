"""What is measured: each scenario is a pair, ours and the raw limit; both return seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from django.conf import settings
from django.db import connection

from myxo_jobs import Jobs, job
from myxo_jobs.models import Job
from myxo_jobs.worker import Worker

TOPIC = "benchmark.noop"
RAW_BATCH = 500

jobs = Jobs()
seen: list[int] = []


class Noop(msgspec.Struct, frozen=True):
    number: int


@job(Noop, topic=TOPIC)
def noop(request: Noop) -> None:
    seen.append(request.number)  # the evidence that each ran once


def drain(count: int) -> float:
    """One worker process, one slot, empties the queue."""
    seen.clear()
    assert jobs.put_many(Noop(number) for number in range(count)) == count
    began = time.perf_counter()
    with Worker(topics=[TOPIC]):
        while len(seen) < count:
            time.sleep(0.002)
        while Job.objects.exists():
            time.sleep(0.002)
        taken = time.perf_counter() - began
    assert sorted(seen) == list(range(count)), "a job was lost or ran twice"
    return taken


def raw_drain(count: int) -> float:
    """The bare statements of claim and delete, in batches of 500, through the driver alone."""
    assert jobs.put_many(Noop(number) for number in range(count)) == count
    connection.ensure_connection()
    statements = _raw_postgres if settings.DATABASE == "postgres" else _raw_sqlite
    began = time.perf_counter()
    emptied = statements()
    taken = time.perf_counter() - began
    assert emptied == count
    return taken


def _raw_postgres() -> int:
    claim = """
        UPDATE myxo_jobs SET worker = 'raw', lease_until = now() + interval '30 s',
            attempts = attempts + 1, started_at = now()
        WHERE id = ANY (ARRAY(
            SELECT id FROM myxo_jobs WHERE topic = %s AND NOT failed AND due IS NOT NULL
                AND due <= now() AND (lease_until IS NULL OR lease_until <= now())
            ORDER BY priority DESC, due, id LIMIT %s FOR UPDATE SKIP LOCKED))
        RETURNING id, payload"""
    raw = connection.connection
    raw.execute("SET synchronous_commit = off")
    emptied = 0
    while rows := raw.execute(claim, (TOPIC, RAW_BATCH)).fetchall():
        ids = [row[0] for row in rows]
        raw.execute("DELETE FROM myxo_jobs WHERE id = ANY (%s) AND worker = 'raw'", (ids,))
        emptied += len(ids)
    raw.execute("RESET synchronous_commit")
    return emptied


def _raw_sqlite() -> int:
    claim = """
        UPDATE myxo_jobs SET worker = 'raw', attempts = attempts + 1,
            lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', '30 seconds'),
            started_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
        WHERE id IN (
            SELECT id FROM myxo_jobs WHERE topic = ? AND NOT failed AND due IS NOT NULL
                AND due <= strftime('%Y-%m-%d %H:%M:%f', 'now') AND lease_until IS NULL
            ORDER BY priority DESC, due, id LIMIT ?)
        RETURNING id, payload"""
    raw = connection.connection
    raw.execute("PRAGMA synchronous = NORMAL")
    emptied = 0
    while rows := raw.execute(claim, (TOPIC, RAW_BATCH)).fetchall():
        raw.execute("BEGIN IMMEDIATE")
        raw.executemany(
            "DELETE FROM myxo_jobs WHERE id = ? AND worker = 'raw'", [row[:1] for row in rows]
        )
        raw.execute("COMMIT")
        emptied += len(rows)
    raw.execute("PRAGMA synchronous = FULL")
    return emptied


SCENARIOS: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "drain": (drain, raw_drain),
}
