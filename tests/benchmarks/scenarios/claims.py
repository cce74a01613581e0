"""What a claim costs as the table grows."""

from __future__ import annotations

import shutil
import sqlite3
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.reports import Report, at_most
from tests.benchmarks.scenarios.drains import act

TOPIC = "benchmark.noop"
BATCH, CLAIMS = 100, 40
CLAIM, FULL, LOOK = "ms a claim of 100", "ms a full pass", "ms a look"
BASELINE = "1,000 pending"
MILLION = 1_000_000

# The rows beside 1,000 that are due: how many, and their columns as SQL. `at` stands for
# the moments of the database: an hour ago and in an hour.
PENDING = {"topic": f"'{TOPIC}'", "due": "{ago}"}
LATER = {"topic": f"'{TOPIC}'", "due": "{later}"}
FLIGHT = PENDING | {
    "worker": "'other.1'", "lease_until": "{later}", "started_at": "{ago}", "attempts": "1",
}  # fmt: skip
KEPT = {
    "topic": f"'{TOPIC}'", "due": "NULL", "attempts": "1", "uid": "{uid}", "result": "'3'",
    "completed_at": "{ago}", "updated_at": "{ago}", "expires_at": "{later}",
    "owner_kind": "'auth.user'", "owner_id": "n % 1000",
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, str]]] = {
    BASELINE: (0, PENDING),
    "10 thousand pending": (9_000, PENDING),
    "100 thousand pending": (99_000, PENDING),
    "1 million pending": (MILLION, PENDING),
    "1 million delayed": (MILLION, LATER),
    "delayed, higher priority": (MILLION, LATER | {"priority": "5"}),
    "1 million failed": (MILLION, PENDING | {"failed": "true", "attempts": "10"}),
    "1 million kept": (MILLION, KEPT),
    "200 topics": (200_000, PENDING | {"topic": "'other.' || (n % 200)"}),
    "5,000 in flight": (5_000, FLIGHT),
}


@scenario(
    f"milliseconds of a claim of {BATCH} jobs that are due, beside other rows",
    postgres=[at_most(CLAIM, 1.3, BASELINE, side=case) for case in CASES if case != BASELINE],
    sqlite=[at_most(CLAIM, 1.5, BASELINE, side=case) for case in CASES if case != BASELINE],
)
def growth(bench: Bench, report: Report) -> None:
    database.empty()
    with _tables(bench) as places:
        for _ in range(bench.rounds):
            for case, where in places.items():
                times = act("sides.ours.claim", topic=TOPIC, batch=BATCH, times=CLAIMS, where=where)
                report.add(CLAIM, case, statistics.median(times["claims"]))
                report.add(FULL, case, statistics.median(times["full passes"]))
                report.add(LOOK, case, statistics.median(times["looks"]))


@contextmanager
def _tables(bench: Bench) -> Iterator[dict[str, str]]:
    """Make a table for each case; give the schema or the file that it stands in."""
    places: dict[str, str] = {}
    if connection.vendor == "postgresql":
        try:
            for place, (case, (count, columns)) in enumerate(CASES.items()):
                places[case] = f"case_{place}"
                _make_schema(places[case], bench.scaled(count) if count else 0, columns)
            yield places
        finally:
            _execute(*(f"DROP SCHEMA IF EXISTS {schema} CASCADE" for schema in places.values()))
        return
    with tempfile.TemporaryDirectory(prefix="myxo-growth-") as folder:
        for place, (case, (count, columns)) in enumerate(CASES.items()):
            places[case] = f"{folder}/case_{place}.sqlite3"
            _make_file(places[case], bench.scaled(count) if count else 0, columns)
        yield places


def _make_schema(schema: str, count: int, columns: dict[str, str]) -> None:
    from myxo_jobs.databases.postgres import PostgreSQL

    moments = {
        "ago": "statement_timestamp() - interval '1 hour'",
        "later": "statement_timestamp() + interval '1 hour'",
        "uid": "gen_random_uuid()",
    }
    _execute(
        f"CREATE SCHEMA {schema}",
        f"CREATE TABLE {schema}.myxo_jobs (LIKE public.myxo_jobs INCLUDING ALL)",
        f"SET search_path = {schema}, public",
        *PostgreSQL().tune_table(),
        *(
            _insert(given, f"generate_series(1, {rows}) AS series(n)", moments)
            for given, rows in ((columns, count), (PENDING, 1_000))
            if rows
        ),
        "VACUUM ANALYZE myxo_jobs",
        "RESET search_path",
        "CHECKPOINT",
    )


def _make_file(path: str, count: int, columns: dict[str, str]) -> None:
    moments = {
        "ago": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 hour')",
        "later": "strftime('%Y-%m-%d %H:%M:%f', 'now', '+1 hour')",
        "uid": "lower(hex(randomblob(16)))",
    }
    connection.close()
    shutil.copyfile(connection.settings_dict["NAME"], path)
    numbers = (
        "(WITH RECURSIVE series(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM series LIMIT {rows}) "
        "SELECT n FROM series)"
    )
    with sqlite3.connect(path) as file:
        for given, rows in ((columns, count), (PENDING, 1_000)):
            if rows:
                file.execute(_insert(given, numbers.format(rows=rows), moments))
    file.close()


def _insert(columns: dict[str, str], numbers: str, moments: dict[str, str]) -> str:
    """Return the SQL that inserts a row for each number `n`."""
    values = ", ".join(value.format(**moments) for value in columns.values())
    return (
        f"INSERT INTO myxo_jobs (payload, {', '.join(columns)}) "
        f"SELECT '{{\"number\":' || n || '}}', {values} FROM {numbers}"
    )


def _execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
