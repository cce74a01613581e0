"""The worker says what keeps dead rows in the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs.databases import database_of, postgres

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = 300


def complaint() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
    return database_of(connection).complaint(connection)


def make_dead_rows() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO myxo_jobs (topic, payload, due) "
            "SELECT 'dead', '{}', now() FROM generate_series(1, %s)",
            [ROWS],
        )
        cursor.execute("DELETE FROM myxo_jobs")
        cursor.execute("SELECT pg_stat_force_next_flush()")


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "MANY_DEAD_ROWS", ROWS)
    monkeypatch.setattr(postgres, "LONG_SECONDS", 0)


@pytest.fixture
def other() -> Iterator[BaseDatabaseWrapper]:
    other = connections.create_connection("default")
    yield other
    other.close()


def test_a_session_that_keeps_an_old_snapshot_is_named(other):
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
        cursor.execute("SET application_name = 'the report'")
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT 1")
        make_dead_rows()
        told = complaint()
        assert f"session of the report {pid} may still see them" in told
        assert f"SELECT pg_terminate_backend({pid})" in told

        cursor.execute("ROLLBACK")
    assert "session" not in complaint()


def test_autovacuum_that_is_off_is_told():
    make_dead_rows()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE myxo_jobs SET (autovacuum_enabled = off)")
    try:
        assert "autovacuum is off" in complaint()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE myxo_jobs RESET (autovacuum_enabled)")
    assert "autovacuum is off" not in complaint()


def test_nothing_is_told_of_a_table_with_few_dead_rows(other):
    with other.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT 1")
        with connection.cursor() as mine:
            mine.execute("VACUUM myxo_jobs")
        assert complaint() == ""
