"""PostgreSQL: SKIP LOCKED, arrays, LISTEN, and commits that need not wait for the drive.

Each statement here is a transaction of its own, so it works through pgbouncer in
transaction mode; nothing relies on the session but the listener, which proves itself.
"""

from __future__ import annotations

import json
import secrets
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import psycopg
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus

from myxo_jobs.databases.base import (
    EMPTIED,
    KEEP_THAT,
    KEPT_NAMES,
    LOGGED_ATTEMPTS,
    RUN_THAT_AGAIN,
    Claimed,
    Database,
    Due,
    KeptColumns,
    Listener,
    OnSuspect,
    Row,
    ValueType,
)
from myxo_jobs.databases.floors import Floor

CHANNEL = "myxo_jobs"
PROBE_CHANNEL = "myxo_jobs_probe"
PROBE_SECONDS = 2.0
PROBE_STEP_SECONDS = 0.2
NOTIFY_BYTES = 7_900  # a notification carries less than 8,000 bytes (NOTIFY, PostgreSQL manual)
ROWS_A_STATEMENT = 5_000

# A lost claim, renewal or deletion only runs a job again, so its commit need not
# wait for the drive. The setting lasts for the statement's own transaction.
UNFLUSHED = "(SELECT set_config('synchronous_commit', 'off', true)) = 'off'"

# A wake-up that is lost costs an idle worker one pause between its looks.
NOTIFY = f"SELECT pg_notify(%s, %s) WHERE {UNFLUSHED}"

# The column's own limit is one above; somebody may have written it there.
MOST_ATTEMPTS = 2_147_483_646

# Its conditions are literals, so that the planner can use the partial index.
WAITING = "NOT failed AND due IS NOT NULL"

# The priorities that a topic has jobs of, highest first, one index probe each: a
# million delayed jobs of one priority cost those of another nothing.
NEXT_PRIORITY = f"""
    SELECT priority FROM myxo_jobs
    WHERE topic = {{topic}} AND {WAITING} {{below}}
    ORDER BY priority DESC LIMIT 1"""
CLAIMABLE = f"""
    {WAITING} AND due <= statement_timestamp()
    AND (lease_until IS NULL OR lease_until <= statement_timestamp())"""
# A pooler may hold a claim back, and with it every renewal: what has ended by the time it
# lets them through may belong to the living.
CLAIMABLE_WHEN_SENT = f"{CLAIMABLE} AND (lease_until IS NULL OR lease_until <= %(sent)s)"
FRESH = f"{WAITING} AND due <= statement_timestamp() AND lease_until IS NULL"

# Where a claim begins at each priority, the highest first.
LEVELS_FOUND = f"""found(priority) AS (
    ({NEXT_PRIORITY.format(topic="%(topic)s", below="")})
  UNION ALL
    SELECT ({NEXT_PRIORITY.format(topic="%(topic)s", below="AND priority < found.priority")})
    FROM found WHERE found.priority IS NOT NULL
),
level AS (SELECT priority, timestamptz '-infinity' AS floor FROM found)"""
LEVELS_GIVEN = """level AS (
    SELECT * FROM unnest(%(priorities)s::smallint[], %(floors)s::timestamptz[])
        AS given(priority, floor)
)"""

EPOCH = "extract(epoch FROM statement_timestamp())::float8"

# Rows keep the order in which the levels give them: a nested loop over them in their
# order, each read along the index, and all that is made of it read from first to last.
LINE = """level CROSS JOIN LATERAL (
        SELECT {columns} FROM myxo_jobs
        WHERE topic = %(topic)s AND priority = level.priority AND due >= level.floor
            AND {claimable}
        ORDER BY due, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    ) AS job
    LIMIT %(limit)s"""
TAKING = f"""worker = %(token)s,
    lease_until = statement_timestamp() + %(lease)s * interval '1 second',
    attempts = CASE WHEN job.again IS NULL THEN least(job.attempts, {MOST_ATTEMPTS}) + 1 ELSE 1 END,
    payload = coalesce(job.again, job.payload),
    cancelled_at = CASE WHEN job.again IS NULL THEN job.cancelled_at END,
    again = NULL,
    started_at = statement_timestamp()"""
WITH_WHAT_IT_WAS = """id, due, lease_until, worker,
            cancelled_at IS NOT NULL AND again IS NULL AS is_cancelled"""
CREATED_AT = "extract(epoch FROM job.created_at)::float8"

# Of jobs that are no suspects: the usual claim, and so the shortest. The array
# makes one walk along the index of what a join would look up one by one.
CLAIM_FRESH = f"""
WITH RECURSIVE {{levels}},
free AS MATERIALIZED (SELECT job.id FROM {LINE.format(columns="id", claimable=FRESH)}),
job AS (
    UPDATE myxo_jobs AS job SET {TAKING}
    WHERE job.id = ANY (ARRAY(SELECT id FROM free)) AND {UNFLUSHED}
    RETURNING job.id, payload, key, attempts, created_at, cancelled_at, priority, due
)
SELECT id, payload, {{key}}, attempts, {{created_at}}, false,
    cancelled_at IS NOT NULL, priority, due::text
FROM job ORDER BY priority DESC, due, id
"""
# Of all jobs, and of kept ones.
CLAIM = f"""
WITH RECURSIVE {{levels}},
free AS MATERIALIZED (
    SELECT job.id, level.priority, job.due, job.lease_until IS NOT NULL AS suspect,
        split_part(job.worker, '/', 2) AS mark, job.is_cancelled
    FROM {LINE.format(columns=WITH_WHAT_IT_WAS, claimable="{claimable}")}
),
-- A suspect is claimed alone: the first in line, or everything before it.
placed AS (
    SELECT id, suspect, mark, row_number() OVER () AS place,
        count(*) FILTER (WHERE suspect) OVER (ROWS UNBOUNDED PRECEDING) AS suspects
    FROM free
),
taken AS MATERIALIZED (SELECT * FROM placed WHERE suspects = 0 OR place = 1 AND {{first}})
UPDATE myxo_jobs AS job
SET {TAKING}{{kept}}
WHERE job.id = {{taken}} AND {UNFLUSHED}
RETURNING job.id, job.payload, {{key}}, job.attempts, {{created_at}},
    CASE WHEN job.id = (SELECT id FROM taken LIMIT 1) THEN (
        SELECT json_build_object(
            'line', (SELECT json_agg(id) FROM taken),
            'epoch', {EPOCH},
            'suspect', (SELECT suspect FROM taken LIMIT 1),
            'mark', (SELECT mark FROM taken LIMIT 1),
            'cancelled', (SELECT json_agg(id) FROM free WHERE is_cancelled),
            'floors', (
                SELECT json_agg(json_build_array(priority, due))
                FROM (SELECT priority, min(due) AS due FROM free GROUP BY priority) AS first
            )
        )
    ) END{{uid}}
"""
# A kept job gets the uid of its place in the line, which only a join tells.
KEPT = f""",
    updated_at = statement_timestamp(), {EMPTIED},
    uid = coalesce(job.uid, (%(uids)s::uuid[])[taken.place])
FROM taken"""
CLAIMS = {
    (on_suspect, told, floored, kept): (
        CLAIM_FRESH if on_suspect == "skip" and not kept else CLAIM
    ).format(
        levels=LEVELS_GIVEN if floored else LEVELS_FOUND,
        claimable=FRESH if on_suspect == "skip" else CLAIMABLE_WHEN_SENT,
        first="mark <> ''" if on_suspect == "stop" else "true",
        key="job.key" if told else "NULL",
        created_at=CREATED_AT if told else "NULL",
        kept=KEPT if kept else "",
        taken=f"{'taken.id AND job.id = ' if kept else ''}ANY (ARRAY(SELECT id FROM taken))",
        uid=", job.uid::text" if kept else "",
    )
    for on_suspect in get_args(OnSuspect)
    for told in (True, False)
    for floored in (True, False)
    for kept in (True, False)
}

# One lock for each topic, by a number that nobody else is likely to use.
LOCK_TOPIC = "SELECT pg_advisory_xact_lock(hashtextextended('myxo_jobs ' || %s, 0))"

LOOK = f"""
WITH RECURSIVE found(topic, priority) AS (
    SELECT asked.topic, ({NEXT_PRIORITY.format(topic="asked.topic", below="")})
    FROM unnest(%(topics)s::text[]) AS asked(topic)
  UNION ALL
    SELECT found.topic,
        ({NEXT_PRIORITY.format(topic="found.topic", below="AND priority < found.priority")})
    FROM found WHERE found.priority IS NOT NULL
),
level AS (
    SELECT topic, priority, timestamptz '-infinity' AS floor FROM found
  UNION ALL
    SELECT * FROM unnest(
        %(floored)s::text[], %(priorities)s::smallint[], %(floors)s::timestamptz[]
    )
)
SELECT level.topic, min(found.wait), {EPOCH} FROM level CROSS JOIN LATERAL (
    (SELECT 0.0 AS wait FROM myxo_jobs
     WHERE topic = level.topic AND priority = level.priority AND due >= level.floor
        AND {CLAIMABLE}
     ORDER BY due, id LIMIT 1)
  UNION ALL
    (SELECT extract(epoch FROM due - statement_timestamp()) FROM myxo_jobs
     WHERE topic = level.topic AND priority = level.priority AND {WAITING}
        AND due > statement_timestamp() AND lease_until IS NULL
        AND due <= statement_timestamp() + %(horizon)s * interval '1 second'
     ORDER BY due, id LIMIT 1)
) AS found
GROUP BY level.topic
"""

# The first condition walks along the index once. The second one is the pair's, looked up
# in a hash: a join would be planned by what is known of the table, which may be nothing.
# Both lists come as one text each, which the driver quotes once and not element by element.
HELD = """id = ANY (string_to_array(%(ids)s, ',')::bigint[])
    AND id::text || ' ' || worker = ANY (string_to_array(%(held)s, ','))"""

DELETE_HELD = f"""
WITH held AS MATERIALIZED (
    SELECT id FROM myxo_jobs
    WHERE {HELD} AND again IS NULL AND {UNFLUSHED} FOR UPDATE SKIP LOCKED
)
DELETE FROM myxo_jobs WHERE id = ANY (ARRAY(SELECT id FROM held)) RETURNING id
"""

UPDATE_HELD = """
WITH held AS MATERIALIZED (
    SELECT given.*
    FROM json_to_recordset(%(held)s::json) AS given(id bigint, token text{columns})
    JOIN myxo_jobs AS job ON job.id = given.id AND job.worker = given.token
    WHERE {condition} AND {flush} FOR UPDATE OF job SKIP LOCKED
)
UPDATE myxo_jobs SET {assignments} FROM held WHERE myxo_jobs.id = held.id RETURNING myxo_jobs.id
"""

STILL_HELD = f"SELECT id FROM myxo_jobs WHERE {HELD}"

INSERT = "INSERT INTO myxo_jobs (topic, payload, key, priority, due) VALUES (%s, %s, %s, %s, {due})"
DUE_AFTER = "statement_timestamp() + %s * interval '1 second'"
DUE_AT = "%s::timestamptz"
INSERT_NOW = INSERT.format(due="statement_timestamp()")
INSERT_AFTER = INSERT.format(due=DUE_AFTER)
INSERT_AT = INSERT.format(due=DUE_AT)
INSERT_KEPT = f"""
INSERT INTO myxo_jobs (topic, payload, key, priority, {", ".join(KEPT_NAMES)}, due)
VALUES (%s, %s, %s, %s, %s::uuid, %s, %s, %s, %s, %s, {{due}}) {KEEP_THAT} RETURNING id
"""
INSERT_MANY = """
INSERT INTO myxo_jobs (topic, payload, key, priority, due)
SELECT topic, payload, key, priority, {due}
FROM unnest(%s::text[], %s::text[], %s::text[], %s::smallint[])
    WITH ORDINALITY AS given(topic, payload, key, priority, place)
ORDER BY place
"""

# Twice as quick, but it knows neither keys nor delays: the moments are the columns' defaults,
# and as in the statements above those of the statement.
COPY = "COPY myxo_jobs (topic, payload, priority) FROM STDIN"
# Fewer are not worth its second round trip.
COPY_FROM_ROWS = 100

# Half a page is left for the new versions of its rows: a claim then stays on the page
# and touches no index. A queue's rows die young, so they are cleaned up early.
TUNE_TABLE = """
ALTER TABLE myxo_jobs SET (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000,
    autovacuum_analyze_scale_factor = 0.05
)
"""

# Words that begin a statement which leaves its session as it was.
PASSING_WORDS = frozenset(
    [
        "select",
        "insert",
        "update",
        "delete",
        "with",
        "values",
        "savepoint",
        "release",
        "rollback",
        "explain",
        "merge",
        "table",
    ]
)
# Functions that do not: settings, and locks held until the session ends.
LASTING_CALLS = ("set_config", "pg_advisory_lock", "pg_try_advisory_lock")


# Dead rows that nothing has cleaned up cost every claim, once there are so many.
MANY_DEAD_ROWS = 20_000
# A transaction that lasts so long was left open, or should run elsewhere.
LONG_SECONDS = 60

DEAD_ROWS = """
SELECT n_dead_tup, greatest(last_vacuum, last_autovacuum) < now() - interval '10 minutes',
    current_setting('autovacuum') = 'off'
        OR coalesce(array_to_string(reloptions, ' ') ~ 'autovacuum_enabled=(off|false)', false)
FROM pg_stat_user_tables JOIN pg_class ON pg_class.oid = relid WHERE relid = 'myxo_jobs'::regclass
"""
# What may still see rows that are dead (PostgreSQL manual, "Routine Vacuuming"), oldest first.
HOLDERS = """
SELECT what, how FROM (
    SELECT CASE WHEN backend_type = 'walsender' THEN 'a standby, by its session '
            WHEN application_name = '' THEN 'session ' ELSE 'session of ' || application_name || ' '
        END || pid AS what,
        'SELECT pg_terminate_backend(' || pid || ')' AS how,
        greatest(age(backend_xmin), age(backend_xid)) AS age
    FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
        AND (datname = current_database() OR backend_type = 'walsender')
        AND coalesce(xact_start, backend_start) < now() - %(seconds)s * interval '1 second'
  UNION ALL
    SELECT 'prepared transaction ' || gid, 'ROLLBACK PREPARED ' || quote_literal(gid),
        age(transaction)
    FROM pg_prepared_xacts
    WHERE database = current_database()
        AND prepared < now() - %(seconds)s * interval '1 second'
  UNION ALL
    SELECT 'replication slot ' || slot_name,
        'SELECT pg_drop_replication_slot(' || quote_literal(slot_name) || ')', age(xmin)
    FROM pg_replication_slots WHERE xmin IS NOT NULL
) AS holder ORDER BY age DESC LIMIT 1
"""

# A network that drops packets without a word is noticed within 15 seconds, also by a
# session that waits for an answer (libpq, "Parameter Key Words").
NOTICE_A_DEAD_NETWORK = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 12_000,
}


# A statement that took longer may have been held back on its way to the server.
PROMPT_SECONDS = 0.2


class Clocks:
    """The servers' clocks, as their last answers told them.

    So it is known without asking when, by the server's clock, a statement was sent.
    """

    def __init__(self) -> None:
        # For each alias, how many seconds it is ahead of this process's monotonic clock.
        self._ahead: dict[str, float] = {}

    def learn(self, connection: BaseDatabaseWrapper, epoch: float, began: float) -> None:
        """Take note of the server's time in the answer to a statement that began then."""
        now = time.monotonic()
        at = began if now - began <= PROMPT_SECONDS else now
        self._ahead[connection.alias] = epoch - at

    def moment(self, connection: BaseDatabaseWrapper, at: float) -> datetime:
        """Return the server's time at a moment of the monotonic clock."""
        if connection.alias not in self._ahead:
            began = time.monotonic()
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {EPOCH}")
                self.learn(connection, cursor.fetchone()[0], began)
        return datetime.fromtimestamp(self._ahead[connection.alias] + at, UTC)


class PostgreSQL(Database):
    own_options = NOTICE_A_DEAD_NETWORK
    sends_wakeups = True
    can_write_beside = True
    now = "statement_timestamp()"
    waiting = WAITING

    def __init__(self) -> None:
        self._clocks = Clocks()

    def is_fit(self, connection: BaseDatabaseWrapper) -> bool:
        raw = connection.connection
        if raw.closed or raw.info.transaction_status != TransactionStatus.IDLE:
            return False
        # An idle session has nothing to say: one that can be read was closed.
        return not _can_be_read(raw.fileno())

    def leaves_traces(self, sql: str) -> bool:
        words = sql.lstrip(" \t\r\n(").split(None, 1)
        if not words or words[0].lower().rstrip(";") not in PASSING_WORDS:
            return True
        return any(call in sql for call in LASTING_CALLS)

    def complaint(self, connection: BaseDatabaseWrapper) -> str:
        with connection.cursor() as cursor:
            cursor.execute(DEAD_ROWS)
            dead, is_overdue, is_off = cursor.fetchone() or (0, False, False)
            if dead < MANY_DEAD_ROWS:
                return ""
            cursor.execute(HOLDERS, {"seconds": LONG_SECONDS})
            holder = cursor.fetchone()
        if holder:
            what, how = holder
            reason = f"{what} may still see them: let it end, or {how}"
        elif is_off:
            reason = "autovacuum is off: turn it on, or VACUUM myxo_jobs now and then"
        elif is_overdue:
            reason = "no vacuum came for ten minutes: look for locks on it, then VACUUM myxo_jobs"
        else:
            return ""
        return f"{dead} dead rows of myxo_jobs slow every claim down, since {reason}"

    @contextmanager
    def _read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        connection.ensure_connection()
        raw = connection.connection
        before = raw.isolation_level
        raw.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        try:
            with transaction.atomic(using=connection.alias):
                yield
        finally:
            if not raw.closed and raw.info.transaction_status == TransactionStatus.IDLE:
                raw.isolation_level = before

    def atomic_job(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
        return self._read_committed(connection)

    def insert(
        self, connection: BaseDatabaseWrapper, row: Row, due: Due, *, again: bool = False
    ) -> int | None:
        values: list[Any] = [row.topic, row.payload, row.key, row.priority]
        statement = INSERT_NOW
        if due is not None:
            values.append(due)
            statement = INSERT_AFTER if isinstance(due, float) else INSERT_AT
        there = RUN_THAT_AGAIN if again else KEEP_THAT
        with connection.cursor() as cursor:
            cursor.execute(f"{statement} {there} RETURNING id", values)
            inserted = cursor.fetchone()
        return inserted[0] if inserted else None

    def insert_kept(
        self, connection: BaseDatabaseWrapper, row: Row, kept: KeptColumns, due: Due
    ) -> int | None:
        moment, values = _moment(due)
        columns = [*msgspec.structs.astuple(row), *msgspec.structs.astuple(kept), *values]
        with connection.cursor() as cursor:
            cursor.execute(INSERT_KEPT.format(due=moment), columns)
            inserted = cursor.fetchone()
        return inserted[0] if inserted else None

    def insert_many(self, connection: BaseDatabaseWrapper, rows: Sequence[Row], due: Due) -> int:
        if due is None and len(rows) >= COPY_FROM_ROWS and all(row.key is None for row in rows):
            return self._copy(connection, rows)
        moment, values = _moment(due)
        statement = INSERT_MANY.format(due=moment) + KEEP_THAT
        inserted = 0
        with connection.cursor() as cursor:
            for start in range(0, len(rows), ROWS_A_STATEMENT):
                part = rows[start : start + ROWS_A_STATEMENT]
                columns: list[Any] = [
                    [row.topic for row in part],
                    [row.payload for row in part],
                    [row.key for row in part],
                    [row.priority for row in part],
                ]
                cursor.execute(statement, values + columns)
                inserted += cursor.rowcount
        return inserted

    def _copy(self, connection: BaseDatabaseWrapper, rows: Sequence[Row]) -> int:
        connection.validate_no_broken_transaction()  # as Django does before a statement
        with connection.cursor() as cursor, connection.wrap_database_errors:
            with cursor.copy(COPY) as copy:
                for row in rows:
                    copy.write_row((row.topic, row.payload, row.priority))
            return int(cursor.rowcount)

    def notify(self, connection: BaseDatabaseWrapper, topics: Iterable[str]) -> None:
        payload = ",".join(topics)
        if len(payload.encode()) > NOTIFY_BYTES:
            payload = ""
        with connection.cursor() as cursor:
            cursor.execute(NOTIFY, [CHANNEL, payload])

    def after(self, seconds: str) -> str:
        return f"statement_timestamp() + {seconds} * interval '1 second'"

    def larger_of(self, one: str, other: str) -> str:
        return f"greatest({one}, {other})"

    def milliseconds_since(self, moment: str) -> str:
        return f"(extract(epoch FROM statement_timestamp() - {moment}) * 1000)::bigint"

    def logged(self, exception: str, traceback: str) -> str:
        log = "coalesce(attempt_log::jsonb, '[]')"
        return f"""(
            CASE WHEN jsonb_array_length({log}) >= {LOGGED_ATTEMPTS} THEN {log} - 1 ELSE {log} END
            || jsonb_build_object(
                'worker', held.token, 'start', {_iso("started_at")},
                'end', {_iso("statement_timestamp()")},
                'exception', {exception}, 'traceback', {traceback}
            )
        )::text"""

    def claim(
        self,
        connection: BaseDatabaseWrapper,
        topic: str,
        limit: int,
        *,
        lease: float,
        token: str,
        on_suspect: OnSuspect,
        told: bool,
        floors: Sequence[Floor] | None,
        uids: Sequence[str] | None,
    ) -> Claimed:
        began = time.monotonic()
        values: dict[str, Any] = {"topic": topic, "limit": limit, "lease": lease, "token": token}
        if on_suspect != "skip":
            values["sent"] = self._clocks.moment(connection, began)
        if floors is not None:
            values["priorities"] = [priority for priority, _ in floors]
            values["floors"] = [due for _, due in floors]
        if uids is not None:
            values["uids"] = uids
        with connection.cursor() as cursor:
            cursor.execute(CLAIMS[on_suspect, told, floors is not None, uids is not None], values)
            rows = cursor.fetchall()
        if on_suspect == "skip" and uids is None:
            return _fresh(rows)
        by_id = {row[0]: row for row in rows}
        about = next((row[5] for row in rows if row[5]), None)
        if about is None:
            return Claimed([], [])
        self._clocks.learn(connection, about["epoch"], began)
        suspect = about["suspect"]
        claimed = [(*by_id[job_id][:5], suspect) for job_id in about["line"]]
        given = {} if uids is None else {row[0]: row[6] for row in rows}
        cancelled = about["cancelled"] or ()
        return Claimed(claimed, about["floors"], given, about["mark"], cancelled)

    @contextmanager
    def one_claim_at_once(self, connection: BaseDatabaseWrapper, topic: str) -> Iterator[None]:
        connection.ensure_connection()
        raw = connection.connection
        is_outermost = raw.info.transaction_status == TransactionStatus.IDLE
        before = raw.isolation_level
        if is_outermost:
            # In a stricter one, what follows would see the state before the lock was ours.
            raw.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        try:
            with self.one_transaction(connection):
                with connection.cursor() as cursor:
                    cursor.execute(LOCK_TOPIC, [topic])
                yield
        finally:
            if is_outermost and not raw.closed:
                raw.isolation_level = before

    def look(
        self,
        connection: BaseDatabaseWrapper,
        topics: Mapping[str, Sequence[Floor] | None],
        horizon: float,
    ) -> dict[str, float]:
        given = [
            (topic, priority, due)
            for topic, floors in topics.items()
            for priority, due in floors or ()
        ]
        values: dict[str, Any] = {
            "topics": [topic for topic, floors in topics.items() if floors is None],
            "floored": [topic for topic, _, _ in given],
            "priorities": [priority for _, priority, _ in given],
            "floors": [due for _, _, due in given],
            "horizon": horizon,
        }
        began = time.monotonic()
        with connection.cursor() as cursor:
            cursor.execute(LOOK, values)
            rows = cursor.fetchall()
        if rows:
            self._clocks.learn(connection, rows[0][2], began)
        return {topic: float(wait) for topic, wait, _ in rows}

    def delete_held(
        self, connection: BaseDatabaseWrapper, held: Sequence[tuple[int, str]]
    ) -> set[int]:
        return self._changed(connection, DELETE_HELD, listed(held))

    def update_held(
        self,
        connection: BaseDatabaseWrapper,
        assignments: str,
        values: Mapping[str, ValueType],
        held: Sequence[tuple[Any, ...]],
        *,
        condition: str = "true",
        flush: bool,
    ) -> set[int]:
        if not held:
            return set()
        types = {"number": "double precision", "text": "text"}
        columns = "".join(f", {name} {types[type_]}" for name, type_ in values.items())
        names = ("id", "token", *values)
        rows = json.dumps([dict(zip(names, row, strict=True)) for row in held])
        statement = UPDATE_HELD.format(
            columns=columns, condition=condition, flush=_flush(flush), assignments=assignments
        )
        return self._changed(connection, statement, {"held": rows})

    def update_at_once(
        self,
        connection: BaseDatabaseWrapper,
        job_id: int,
        assignments: str,
        values: Sequence[Any],
        condition: str,
    ) -> bool:
        free = f"SELECT id FROM myxo_jobs WHERE id = %s AND {condition} FOR UPDATE SKIP LOCKED"
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE myxo_jobs SET {assignments} WHERE id = ({free})", [*values, job_id]
            )
            return bool(cursor.rowcount)

    def one_transaction(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[Any]:
        connection.ensure_connection()
        transaction: AbstractContextManager[Any] = connection.connection.transaction()
        return _translated(connection, transaction)

    def still_held(
        self,
        connection: BaseDatabaseWrapper,
        held: Sequence[tuple[int, str]],
        *,
        condition: str = "true",
    ) -> set[int]:
        return self._changed(connection, f"{STILL_HELD} AND {condition}", listed(held))

    def _changed(
        self, connection: BaseDatabaseWrapper, statement: str, values: Mapping[str, Any]
    ) -> set[int]:
        with connection.cursor() as cursor:
            cursor.execute(statement, values)
            return {row[0] for row in cursor.fetchall()}

    def listen(self, alias: str) -> Listener:
        return PostgreSQLListener(self, alias)

    def tune_table(self) -> Sequence[str]:
        return [TUNE_TABLE]


def _can_be_read(descriptor: int) -> bool:
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([descriptor], [], [], 0)[0])
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _fresh(rows: Sequence[tuple[Any, ...]]) -> Claimed:
    """Return what CLAIM_FRESH took."""
    first = {row[7]: row[8] for row in reversed(rows)}
    cancelled = [row[0] for row in rows if row[6]]
    return Claimed([row[:6] for row in rows], list(first.items()), cancelled=cancelled)


def _moment(due: Due) -> tuple[str, list[Any]]:
    """Return the SQL of when a job is due, and its values."""
    if due is None:
        return "statement_timestamp()", []
    return (DUE_AFTER if isinstance(due, float) else DUE_AT), [due]


def _iso(moment: str) -> str:
    return f"""to_char({moment} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""


@contextmanager
def _translated(
    connection: BaseDatabaseWrapper, block: AbstractContextManager[Any]
) -> Iterator[None]:
    """Enter a block of the driver's, whose errors Django knows under its own names."""
    with connection.wrap_database_errors, block:
        yield


def _flush(flush: bool) -> str:
    return "true" if flush else UNFLUSHED


def listed(held: Sequence[tuple[int, str]]) -> dict[str, str]:
    return {
        "ids": ",".join([str(job_id) for job_id, _ in held]),
        "held": ",".join([f"{job_id} {token}" for job_id, token in held]),
    }


class PostgreSQLListener(Listener):
    def __init__(self, database: PostgreSQL, alias: str) -> None:
        self._database = database
        self._alias = alias
        self._connection = database.open(alias)

    def wait(self, seconds: float) -> set[str] | None:
        topics: set[str] = set()
        for payload in self._payloads(CHANNEL, seconds):
            if not payload:
                return None
            topics.update(payload.split(","))
        return topics

    def hears(self, gives_up: Callable[[], bool]) -> bool:
        # By a channel of its own: what a pooler's session was once told to listen to, it
        # hears for ever, and brings to whoever uses it next.
        self._execute(f"LISTEN {PROBE_CHANNEL}")
        probe = secrets.token_hex(8)
        other = self._database.open(self._alias)
        try:
            with other.cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, %s)", [PROBE_CHANNEL, probe])
        finally:
            other.close()
        heard = self._hears_of(probe, gives_up)
        self._execute(f"UNLISTEN {PROBE_CHANNEL}")
        if heard:
            self._execute(f"LISTEN {CHANNEL}")
        return heard

    def _hears_of(self, probe: str, gives_up: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PROBE_SECONDS
        while time.monotonic() < deadline and not gives_up():
            # Others may prove themselves, too.
            if probe in self._payloads(PROBE_CHANNEL, PROBE_STEP_SECONDS):
                return True
        return False

    def _payloads(self, channel: str, seconds: float) -> list[str]:
        with self._connection.wrap_database_errors:
            heard = self._connection.connection.notifies(timeout=seconds, stop_after=1)
            return [one.payload for one in heard if one.channel == channel]

    def _execute(self, statement: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def close(self) -> None:
        self._connection.close()
