"""Reads that take a screen the same time however long the table is."""

from __future__ import annotations

from datetime import datetime
from typing import cast

from django.core.paginator import Paginator
from django.db import connections
from django.db.models import QuerySet
from django.utils.functional import cached_property

from myxo_jobs import queue
from myxo_jobs.databases import database_of
from myxo_jobs.handlers import registry
from myxo_jobs.models import Job

COUNTED_ROWS = 10_000
LISTED_TOPICS = 100
# Failed jobs have no index by topic: the newest tell which topics fail.
NEWEST_FAILURES = 1_000

# One index probe a topic, however many jobs each has.
WAITING_TOPICS = """
WITH RECURSIVE found(topic) AS (
    SELECT (SELECT topic FROM myxo_jobs WHERE {waiting} ORDER BY topic LIMIT 1)
  UNION ALL
    SELECT (SELECT topic FROM myxo_jobs WHERE {waiting} AND topic > found.topic
            ORDER BY topic LIMIT 1)
    FROM found WHERE found.topic IS NOT NULL
)
SELECT topic FROM found WHERE topic IS NOT NULL LIMIT %s
"""

# The range of ids is halved until it is empty: some 40 probes of the primary key.
MIDDLE = "low + (high - low) / 2"
IS_BEFORE = f"(SELECT created_at FROM myxo_jobs WHERE id >= {MIDDLE} ORDER BY id LIMIT 1) < %s"  # noqa: S608
FIRST_ID_PUT = f"""
WITH RECURSIVE span(low, high) AS (
    SELECT (SELECT min(id) FROM myxo_jobs), (SELECT max(id) + 1 FROM myxo_jobs)
  UNION ALL
    SELECT CASE WHEN {IS_BEFORE} THEN {MIDDLE} + 1 ELSE low END,
        CASE WHEN {IS_BEFORE} THEN high ELSE {MIDDLE} END
    FROM span WHERE low < high
)
SELECT low FROM span WHERE low >= high
"""  # noqa: S608


def topics() -> list[str]:
    """Return the topics that have a handler here, wait or run, or failed of late.

    At most 100 that have no handler, in the order of their names.
    """
    connection = connections[queue.alias()]
    with connection.cursor() as cursor:
        statement = WAITING_TOPICS.format(waiting=database_of(connection).waiting)
        cursor.execute(statement, [LISTED_TOPICS])
        waiting = {row[0] for row in cursor.fetchall()}
    newest = Job.objects.filter(failed=True).order_by("-pk")
    failed = set(newest.values_list("topic", flat=True)[:NEWEST_FAILURES])
    handled = {handler.topic for handler in registry}
    others = sorted((waiting | failed) - handled)[:LISTED_TOPICS]
    return sorted(handled | set(others))


def first_id_put(moment: datetime) -> int | None:
    """Return the id from which on jobs were put at `moment` or later.

    One above the highest when all are older, None when there is no job. Ids are taken
    to rise with the moment of the put.
    """
    connection = connections[queue.alias()]
    value = Job._meta.get_field("created_at").get_db_prep_value(moment, connection)
    with connection.cursor() as cursor:
        cursor.execute(FIRST_ID_PUT, [value, value])
        row = cursor.fetchone()
    return row[0] if row else None


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Pages of the first 10,000 rows; it counts no further."""

    @cached_property
    def count(self) -> int:
        return min(self._counted, COUNTED_ROWS)

    @property
    def is_capped(self) -> bool:
        """Whether there are more rows than it counts."""
        return self._counted > COUNTED_ROWS

    @cached_property
    def _counted(self) -> int:
        rows = cast("QuerySet[Job]", self.object_list).order_by().values("pk")
        return rows[: COUNTED_ROWS + 1].count()
