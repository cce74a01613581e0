"""SQLite uses a partial index only where a statement repeats its condition as it is written."""

from __future__ import annotations

import pytest
from django.db import connection

from myxo_jobs.databases import sqlite

pytestmark = pytest.mark.django_db

# As Django writes it up to 6.0, and since.
CONDITIONS = ['"due" IS NOT NULL AND NOT "failed"', '"due" IS NOT NULL AND "failed" = 0']


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(
    "statement",
    ["HIGHEST_PRIORITY", "NEXT_PRIORITY", "FREE", "CAN_CLAIM", "NEXT_DUE"],
)
def test_a_claim_uses_its_index_whichever_django_made_it(condition, statement):
    sql = getattr(sqlite, statement)
    with connection.cursor() as cursor:
        cursor.execute("DROP INDEX myxo_jobs_claim")
        cursor.execute(
            'CREATE INDEX myxo_jobs_claim ON myxo_jobs (topic, priority DESC, "due", id) '
            f"WHERE {condition}"
        )
        plan = connection.connection.execute(
            f"EXPLAIN QUERY PLAN {sql}", ["1"] * sql.count("?")
        ).fetchall()

    assert [step[3].partition(" (")[0] for step in plan] == [
        "SEARCH myxo_jobs USING INDEX myxo_jobs_claim"
    ]


def test_the_index_that_this_django_made_is_one_of_those():
    with connection.cursor() as cursor:
        cursor.execute("SELECT sql FROM sqlite_master WHERE name = 'myxo_jobs_claim'")
        (made,) = cursor.fetchone()

    assert any(made.endswith(f"WHERE ({condition})") for condition in CONDITIONS)
