"""The database of a run: made, emptied between measurements, and asked what it did."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from contextlib import ExitStack

from django.db import connection

from tests.postgres_server import postgres_server

RAW_TABLE = "raw_jobs"


def choose(name: str, stack: ExitStack) -> None:
    """Let this process, and those it starts, use a database of their own until the stack ends."""
    os.environ["MYXO_TEST_DATABASE"] = name
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    if name == "sqlite":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="myxo-benchmark-"))
        os.environ["MYXO_TEST_NAMES"] = json.dumps({"default": f"{folder}/default.sqlite3"})
    elif not os.environ.get("MYXO_TEST_POSTGRES"):
        os.environ["MYXO_TEST_POSTGRES"] = stack.enter_context(postgres_server(flush=True))


def prepare() -> None:
    """Make the tables, the copy that raw statements work on, and the notes that jobs update."""
    from django.core.management import call_command

    from tests.app.models import Note
    from tests.benchmarks.jobs import NOTES

    call_command("migrate", run_syncdb=True, verbosity=0)
    Note.objects.bulk_create(Note(pk=number + 1, text="a note") for number in range(NOTES))
    with connection.cursor() as cursor:
        for statement in _copy_statements():
            cursor.execute(statement)
    empty()


def _copy_statements() -> list[str]:
    if connection.vendor == "postgresql":
        from myxo_jobs.databases.postgres import PostgreSQL

        return [
            f"CREATE TABLE {RAW_TABLE} (LIKE myxo_jobs INCLUDING ALL)",
            *(_of_copy(statement) for statement in PostgreSQL().tune_table()),
        ]
    with connection.cursor() as cursor:
        cursor.execute("SELECT sql FROM sqlite_master WHERE tbl_name = 'myxo_jobs' AND sql > ''")
        return [_of_copy(sql) for (sql,) in cursor.fetchall()]


def _of_copy(sql: str) -> str:
    return sql.replace("myxo_jobs", RAW_TABLE)


def empty() -> None:
    """Empty both tables and write out what the last measurement left to be written."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"TRUNCATE myxo_jobs, {RAW_TABLE}")
            cursor.execute("VACUUM notes_note")
            cursor.execute("CHECKPOINT")
        else:
            cursor.execute("DELETE FROM myxo_jobs")
            cursor.execute(f"DELETE FROM {RAW_TABLE}")
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def version() -> str:
    if connection.vendor == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    connection.ensure_connection()
    number: int = connection.pg_version  # type: ignore[attr-defined]
    return f"PostgreSQL {number // 10_000}.{number % 10_000}"


def label(name: str) -> str:
    return {"postgres": "PostgreSQL", "sqlite": "SQLite"}[name]


class Activity:
    """What a PostgreSQL database did since this was made."""

    def __init__(self) -> None:
        self._before = _counters()

    def since(self) -> dict[str, float]:
        """Return `transactions`, and `wal` in bytes. One of them is this question's own."""
        after = _counters()
        return {name: after[name] - before for name, before in self._before.items()}


def _counters() -> dict[str, float]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT xact_commit + xact_rollback, pg_current_wal_insert_lsn() - '0/0'::pg_lsn "
            "FROM pg_stat_database WHERE datname = current_database()"
        )
        transactions, wal = cursor.fetchone()
    return {"transactions": float(transactions), "wal": float(wal)}


def flushes() -> int:
    """Return how often this PostgreSQL server has flushed its log to the drive."""
    with connection.cursor() as cursor:
        if connection.pg_version >= 18_00_00:  # type: ignore[attr-defined]
            cursor.execute("SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'")
        else:
            cursor.execute("SELECT wal_sync FROM pg_stat_wal")
        return int(cursor.fetchone()[0])
