"""SQLite: one writer at a time, in a file that tells when it has changed.

The worker waits for the write lock by its own short retries: SQLite's own waits grow
to 100 ms (https://sqlite.org/src/file/src/main.c, sqliteDefaultBusyCallback), and a
worker that sleeps so long beside steady writers never gets its turn.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec
from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

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
from myxo_jobs.databases.file_notices import FileNotices
from myxo_jobs.databases.floors import Floor
from myxo_jobs.models import sqlite_moment

T = TypeVar("T")

BUSY_RETRY_SECONDS = 0.001
# How long the worker tries before it reports the file as busy, and tries again later.
BUSY_PATIENCE_SECONDS = 2.0
# Who waits for the write lock looks for it ever more rarely, at last ten times a second, and
# a busy worker would always have taken it again. So after a write its loop rests for a share
# of the time that took: for more of it while another connection has written lately.
SHARE_BESIDE_OTHERS = 0.5
SHARE_ALONE = 0.1
OTHERS_SECONDS = 10.0
# Enough for whoever waits; and a write that took much longer has waited itself.
LONGEST_REST_SECONDS = 0.02
# An atomic job has not begun yet while it waits for the lock: it can wait longer.
ATOMIC_PATIENCE_SECONDS = 60.0
# How often a listener looks at the file at most, and where the system tells nothing of
# writes: a look costs 0.1 ms of CPU, most of it for waking.
LOOK_SECONDS = 0.02
# A write can be seen once its transaction has committed, a moment after the system has told
# of it: it is looked for after so long, then after twice as long, and so on.
FIRST_LOOK_SECONDS = 0.001

NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
# The condition of the claim index, which SQLite compares as it is written: Django up to
# 6.0 writes NOT failed, later ones failed = 0, and an index outlives an update.
WAITING = "NOT failed AND failed = 0 AND due IS NOT NULL"
CLAIMABLE = f"{WAITING} AND due <= {NOW} AND (lease_until IS NULL OR lease_until <= {NOW})"

HIGHEST_PRIORITY = f"""
SELECT priority FROM myxo_jobs WHERE topic = ? AND {WAITING} ORDER BY priority DESC LIMIT 1
"""
NEXT_PRIORITY = f"""
SELECT priority FROM myxo_jobs WHERE topic = ? AND {WAITING} AND priority < ?
ORDER BY priority DESC LIMIT 1
"""
# `created_at` as the text it is: Django's converter would drop that it is UTC.
FREE = f"""
SELECT id, coalesce(again, payload), key, CASE WHEN again IS NULL THEN attempts + 1 ELSE 1 END,
    created_at || '', lease_until IS NOT NULL, due || '',
    CASE WHEN instr(worker, '/') THEN substr(worker, instr(worker, '/') + 1) ELSE '' END, uid,
    cancelled_at IS NOT NULL AND again IS NULL
FROM myxo_jobs
WHERE topic = ? AND priority = ? AND due >= ? AND {WAITING} AND due <= {NOW}
    AND (lease_until IS NULL OR lease_until <= ?)
ORDER BY due, id LIMIT ?
"""
TAKE = f"""
UPDATE myxo_jobs SET worker = ?, started_at = {NOW},
    attempts = CASE WHEN again IS NULL THEN attempts + 1 ELSE 1 END,
    payload = coalesce(again, payload), again = NULL,
    cancelled_at = CASE WHEN again IS NULL THEN cancelled_at END,
    lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', ? || ' seconds')
WHERE id """
# All at once: between two statements, or two of their rows, another thread may keep Python.
GIVEN = "IN (SELECT value FROM json_each(?))"
TAKE_ALL = f"{TAKE} {GIVEN}"
TAKE_KEPT = (
    TAKE.replace("SET worker", f"SET updated_at = {NOW}, {EMPTIED}, uid = ?, worker") + "= ?"
)
# On a full drive a transaction that changes nothing succeeds. A claim that stopped before
# a suspect writes, so that its success tells that the holder can write, too.
TOUCH = "UPDATE myxo_jobs SET topic = topic WHERE id = ?"
HELD = f"""
SELECT json_group_array(id) FROM myxo_jobs WHERE id {GIVEN} AND worker = ? AND again IS NULL
"""
DELETE = f"DELETE FROM myxo_jobs WHERE id {GIVEN}"
CAN_CLAIM = f"""
SELECT 1 FROM myxo_jobs WHERE topic = ? AND priority = ? AND due >= ? AND {CLAIMABLE}
ORDER BY due, id LIMIT 1
"""
NEXT_DUE = f"""
SELECT (julianday(due) - julianday('now')) * 86400.0 FROM myxo_jobs
WHERE topic = ? AND priority = ? AND {WAITING} AND due > {NOW} AND lease_until IS NULL
    AND due <= strftime('%Y-%m-%d %H:%M:%f', 'now', ? || ' seconds')
ORDER BY due, id LIMIT 1
"""

# Through Django's cursor, so a literal per cent sign is doubled.
INSERT = "INSERT INTO myxo_jobs (topic, payload, key, priority, due) VALUES (%s, %s, %s, %s, {due})"
DUE_AFTER = "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', %s || ' seconds')"
INSERT_AFTER = INSERT.format(due=DUE_AFTER)
INSERT_AT = INSERT.format(due="%s")

# A write-ahead log is started over after `wal_autocheckpoint` pages, 1,000 by default; while
# a reader keeps an older state of the file it grows on (https://sqlite.org/wal.html,
# "Avoiding Excessively Large WAL Files"). One that has missed ten such moments, and has
# grown since it was last looked at, has such a reader: it never shrinks by itself.
MISSED_CHECKPOINTS = 10
USUAL_CHECKPOINT_PAGES = 1_000

# Words that begin a statement which leaves its connection as it was. A transaction that
# is left open is seen by `is_fit`.
PASSING_WORDS = frozenset(
    [
        "begin",
        "commit",
        "select",
        "insert",
        "update",
        "delete",
        "replace",
        "with",
        "values",
        "savepoint",
        "release",
        "rollback",
        "explain",
    ]
)


class Others:
    """Whether other connections write to a file, by what one connection sees of it."""

    def __init__(self, version: int | None) -> None:
        self._version = version
        self._wrote_at = -math.inf

    def note(self, version: int | None) -> None:
        """Take note of the file's version, which others' commits move; None while it is busy."""
        if version is None or version != self._version:
            self._version = version
            self._wrote_at = time.monotonic()

    @property
    def write(self) -> bool:
        return time.monotonic() - self._wrote_at < OTHERS_SECONDS


class SQLite(Database):
    sends_wakeups = False
    can_write_beside = False
    now = NOW
    waiting = WAITING

    def __init__(self) -> None:
        # Size of each file's write-ahead log when it was last looked at.
        self._log_bytes: dict[str, int] = {}
        self._others: WeakKeyDictionary[BaseDatabaseWrapper, Others] = WeakKeyDictionary()

    def open(self, alias: str) -> BaseDatabaseWrapper:
        connection = super().open(alias)
        raw = connection.connection
        with connection.wrap_database_errors:
            journal_mode = _patiently(lambda: raw.execute("PRAGMA journal_mode").fetchone()[0])
            if journal_mode == "wal":
                # A claim or a deletion that a power cut undoes only runs a job again.
                # In any other mode NORMAL may corrupt the file, so the project's stays.
                raw.execute("PRAGMA synchronous = NORMAL")
            raw.execute("PRAGMA busy_timeout = 0")
        return connection

    def complaint(self, connection: BaseDatabaseWrapper) -> str:
        raw = connection.connection
        with connection.wrap_database_errors:
            (pages,) = raw.execute("PRAGMA wal_autocheckpoint").fetchone()
            (page_bytes,) = raw.execute("PRAGMA page_size").fetchone()
        file = _file_of(connection)
        try:
            size = Path(f"{file}-wal").stat().st_size
        except OSError:  # another journal mode
            return ""
        before = self._log_bytes.get(file, size)
        self._log_bytes[file] = size
        limit = MISSED_CHECKPOINTS * (pages or USUAL_CHECKPOINT_PAGES) * page_bytes
        if size <= max(limit, before):
            return ""
        return (
            f"{file}-wal has grown to {size / 2**20:.0f} MiB: some process reads in a transaction "
            f"that it keeps open; find it with `lsof {file}` and let it end"
        )

    def let_others_write(self, connection: BaseDatabaseWrapper, seconds: float) -> None:
        version = _data_version(connection)
        others = self._others.setdefault(connection, Others(version))
        others.note(version)
        share = SHARE_BESIDE_OTHERS if others.write else SHARE_ALONE
        time.sleep(min(seconds * share, LONGEST_REST_SECONDS))

    def is_fit(self, connection: BaseDatabaseWrapper) -> bool:
        try:
            return not connection.connection.in_transaction
        except sqlite3.ProgrammingError:  # it is closed
            return False

    def leaves_traces(self, sql: str) -> bool:
        words = sql.lstrip(" \t\r\n(").split(None, 1)
        return not words or words[0].lower().rstrip(";") not in PASSING_WORDS

    def atomic_job(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
        return self._immediate_atomic(connection)

    @contextmanager
    def _immediate_atomic(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        connection.ensure_connection()  # which sets the mode
        before = connection.transaction_mode  # type: ignore[attr-defined]
        connection.transaction_mode = "IMMEDIATE"  # type: ignore[attr-defined]
        try:
            block = transaction.atomic(using=connection.alias)
            _patiently(block.__enter__, ATOMIC_PATIENCE_SECONDS)
        finally:
            connection.transaction_mode = before  # type: ignore[attr-defined]
        with _Entered(block):
            yield

    def insert(
        self, connection: BaseDatabaseWrapper, row: Row, due: Due, *, again: bool = False
    ) -> int | None:
        statement, moment = _insert(due)
        there = RUN_THAT_AGAIN if again else KEEP_THAT
        values = [row.topic, row.payload, row.key, row.priority, moment]
        with connection.cursor() as cursor:
            cursor.execute(f"{statement} {there} RETURNING id", values)
            inserted = cursor.fetchall()
        return inserted[0][0] if inserted else None

    def insert_kept(
        self, connection: BaseDatabaseWrapper, row: Row, kept: KeptColumns, due: Due
    ) -> int | None:
        statement, moment = _insert(due)
        names, places = ", ".join(KEPT_NAMES), ", ".join(["%s"] * len(KEPT_NAMES))
        statement = statement.replace("(topic", f"({names}, topic")
        statement = statement.replace("VALUES (", f"VALUES ({places}, ")
        uid, *others = msgspec.structs.astuple(kept)
        values = [UUID(uid).hex, *others, *msgspec.structs.astuple(row), moment]
        with connection.cursor() as cursor:
            cursor.execute(f"{statement} {KEEP_THAT} RETURNING id", values)
            inserted = cursor.fetchall()
        return inserted[0][0] if inserted else None

    def insert_many(self, connection: BaseDatabaseWrapper, rows: Sequence[Row], due: Due) -> int:
        statement, moment = _insert(due)
        with connection.cursor() as cursor:
            cursor.executemany(
                f"{statement} {KEEP_THAT}",
                [(row.topic, row.payload, row.key, row.priority, moment) for row in rows],
            )
            inserted: int = cursor.rowcount
        return inserted

    def notify(self, connection: BaseDatabaseWrapper, topics: Iterable[str]) -> None:
        """Nothing to send: the commit changed the file, and the listeners watch it."""

    def after(self, seconds: str) -> str:
        return f"strftime('%Y-%m-%d %H:%M:%f', 'now', {seconds} || ' seconds')"

    def larger_of(self, one: str, other: str) -> str:
        return f"max({one}, {other})"

    def milliseconds_since(self, moment: str) -> str:
        days = f"julianday('now') - julianday({moment})"
        return f"CAST(round(({days}) * 86400000.0) AS INTEGER)"

    def logged(self, exception: str, traceback: str) -> str:
        log = "coalesce(attempt_log, '[]')"
        return f"""json_insert(
            CASE WHEN json_array_length({log}) >= {LOGGED_ATTEMPTS}
                THEN json_remove({log}, '$[1]') ELSE {log} END,
            '$[#]',
            json_object(
                'worker', held.token, 'start', {_iso("started_at")}, 'end', {_iso(NOW)},
                'exception', {exception}, 'traceback', {traceback}
            )
        )"""

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
        over_at = "" if on_suspect == "skip" else _now(connection)  # as texts are compared
        free: list[Any] = []
        seen: list[Floor] = []
        with _immediate(connection) as raw:
            for priority, floor in _levels(raw, topic, floors):
                room = limit - len(free)
                if room <= 0:
                    break
                found = raw.execute(FREE, (topic, priority, floor, over_at, room)).fetchall()
                if found:
                    seen.append((priority, found[0][6]))
                    free += found
            taken = _up_to_a_suspect(free, takes_any=on_suspect == "take")
            given: dict[int, str] = {}
            if uids is None:
                raw.execute(TAKE_ALL, (token, lease, json.dumps([row[0] for row in taken])))
            else:
                given = {
                    row[0]: row[8] or UUID(uid).hex for row, uid in zip(taken, uids, strict=False)
                }
                kept = [(given[row[0]], token, lease, row[0]) for row in taken]
                raw.executemany(TAKE_KEPT, kept)
            if free and not taken:
                raw.execute(TOUCH, (free[0][0],))
        names = {job_id: str(UUID(uid)) for job_id, uid in given.items()}
        mark = taken[0][7] if taken else ""
        cancelled = [row[0] for row in taken if row[9]]
        return Claimed([row[:6] for row in taken], seen, names, mark, cancelled)

    def one_claim_at_once(
        self, connection: BaseDatabaseWrapper, topic: str
    ) -> AbstractContextManager[Any]:
        return _immediate(connection)

    def look(
        self,
        connection: BaseDatabaseWrapper,
        topics: Mapping[str, Sequence[Floor] | None],
        horizon: float,
    ) -> dict[str, float]:
        connection.ensure_connection()
        raw = connection.connection
        with connection.wrap_database_errors:
            return _patiently(lambda: _look(raw, topics, horizon))

    def delete_held(
        self, connection: BaseDatabaseWrapper, held: Sequence[tuple[int, str]]
    ) -> set[int]:
        by_token: defaultdict[str, list[int]] = defaultdict(list)
        for job_id, token in held:
            by_token[token].append(job_id)
        deleted: set[int] = set()
        with _immediate(connection) as raw:
            for token, ids in by_token.items():
                (found,) = raw.execute(HELD, (json.dumps(ids), token)).fetchone()
                raw.execute(DELETE, (found,))
                deleted.update(json.loads(found))
        return deleted

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
        names = ("id", "token", *values)
        columns = ", ".join(
            f"json_extract(value, '$[{place}]') AS {name}" for place, name in enumerate(names)
        )
        statement = (
            f"WITH held AS MATERIALIZED (SELECT {columns} FROM json_each(?)) "
            f"UPDATE myxo_jobs SET {assignments} FROM held "
            "WHERE myxo_jobs.id = held.id AND myxo_jobs.worker = held.token "
            f"AND {condition} RETURNING id"
        )
        with _immediate(connection) as raw:
            return {row[0] for row in raw.execute(statement, (json.dumps(held),)).fetchall()}

    def update_at_once(
        self,
        connection: BaseDatabaseWrapper,
        job_id: int,
        assignments: str,
        values: Sequence[Any],
        condition: str,
    ) -> bool:
        with connection.cursor() as cursor:
            (patience,) = cursor.execute("PRAGMA busy_timeout").fetchone()
            cursor.execute("PRAGMA busy_timeout = 0")
            try:
                cursor.execute(
                    f"UPDATE myxo_jobs SET {assignments} WHERE id = %s AND {condition}",
                    [*values, job_id],
                )
                return bool(cursor.rowcount)
            except OperationalError as error:
                if _is_busy(error):
                    return False
                raise
            finally:
                cursor.execute(f"PRAGMA busy_timeout = {patience}")

    def one_transaction(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[Any]:
        return _immediate(connection)

    def still_held(
        self,
        connection: BaseDatabaseWrapper,
        held: Sequence[tuple[int, str]],
        *,
        condition: str = "true",
    ) -> set[int]:
        statement = f"SELECT 1 FROM myxo_jobs WHERE id = ? AND worker = ? AND {condition}"
        connection.ensure_connection()
        raw = connection.connection

        def find() -> set[int]:
            return {
                job_id
                for job_id, token in held
                if raw.execute(statement, (job_id, token)).fetchone()
            }

        with connection.wrap_database_errors:
            return _patiently(find)

    def listen(self, alias: str) -> Listener:
        return SQLiteListener(self, alias)


def _iso(moment: str) -> str:
    return f"replace({moment}, ' ', 'T') || 'Z'"


def _insert(due: Due) -> tuple[str, float | str]:
    if due is None:
        return INSERT_AFTER, 0.0
    if isinstance(due, float):
        return INSERT_AFTER, due
    return INSERT_AT, sqlite_moment(due)


def _levels(raw: sqlite3.Connection, topic: str, floors: Sequence[Floor] | None) -> Iterator[Floor]:
    """Yield where to begin at each priority, the highest first.

    Without floors: the priorities that the topic has jobs of, one index probe each.
    """
    if floors is not None:
        yield from floors
        return
    row = raw.execute(HIGHEST_PRIORITY, (topic,)).fetchone()
    while row:
        yield row[0], ""  # as texts are compared, the beginning
        row = raw.execute(NEXT_PRIORITY, (topic, row[0])).fetchone()


def _now(connection: BaseDatabaseWrapper) -> str:
    connection.ensure_connection()
    with connection.wrap_database_errors:
        now: str = connection.connection.execute(f"SELECT {NOW}").fetchone()[0]
    return now


def _up_to_a_suspect(rows: list[Any], *, takes_any: bool) -> list[Any]:
    """Return the rows before the first suspect, or that one alone if it comes first.

    Unless `takes_any`, it must be known that its worker is dead.
    """
    for place, row in enumerate(rows):
        if row[5]:
            return rows[: place or (takes_any or row[7] != "")]
    return rows


def _look(
    raw: sqlite3.Connection, topics: Mapping[str, Sequence[Floor] | None], horizon: float
) -> dict[str, float]:
    found: dict[str, float] = {}
    for topic, floors in topics.items():
        for priority, floor in _levels(raw, topic, floors):
            if raw.execute(CAN_CLAIM, (topic, priority, floor)).fetchone():
                found[topic] = 0.0
                break
            row = raw.execute(NEXT_DUE, (topic, priority, horizon)).fetchone()
            if row:
                found[topic] = min(row[0], found.get(topic, row[0]))
    return found


def _is_busy(error: BaseException | None) -> bool:
    if isinstance(error, OperationalError):
        error = error.__cause__
    # The low byte is the primary code: busy, or locked by a reader of a shared cache.
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def _patiently(action: Callable[[], T], seconds: float = BUSY_PATIENCE_SECONDS) -> T:
    """Do what may find the file busy, again and again; raise the last answer in the end."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except (sqlite3.OperationalError, OperationalError) as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
        time.sleep(BUSY_RETRY_SECONDS)


@contextmanager
def _immediate(connection: BaseDatabaseWrapper) -> Iterator[sqlite3.Connection]:
    """Open a write transaction, or join the one that is open, and give the raw connection."""
    connection.ensure_connection()
    raw = connection.connection
    with connection.wrap_database_errors:
        if raw.in_transaction:
            yield raw
            return
        _patiently(lambda: raw.execute("BEGIN IMMEDIATE"))
        try:
            yield raw
            # Without WAL a reader can hold the commit up; the transaction stays open.
            _patiently(lambda: raw.execute("COMMIT"))
        finally:
            if raw.in_transaction:
                raw.execute("ROLLBACK")


class _Entered(AbstractContextManager[None]):
    """A context manager that was entered already."""

    def __init__(self, block: transaction.Atomic) -> None:
        self._block = block

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: Any) -> None:
        self._block.__exit__(*raised)


class SQLiteListener(Listener):
    """Watches `PRAGMA data_version`, which moves when another connection commits.

    It looks when the system tells that the file was written, or else all the time.
    """

    def __init__(self, database: SQLite, alias: str) -> None:
        self._connection = database.open(alias)
        self._version = _data_version(self._connection)
        self._changed_at = 0.0
        # How long to wait for the next notice before the file is looked at anyway.
        self._pause = LOOK_SECONDS
        self._notices = _notices_of(self._connection)

    def wait(self, seconds: float) -> set[str] | None:
        deadline = time.monotonic() + seconds
        time.sleep(max(self._changed_at + LOOK_SECONDS - time.monotonic(), 0.0))
        while not self._has_changed():
            left = deadline - time.monotonic()
            if left <= 0:
                return set()
            if self._notices is None:
                time.sleep(LOOK_SECONDS)
            else:
                self._wait_for_a_write(self._notices, left)
        self._changed_at = time.monotonic()
        self._pause = FIRST_LOOK_SECONDS  # another write may be on its way to be seen
        return None

    def _wait_for_a_write(self, notices: FileNotices, left: float) -> None:
        """Wait until there may be something to see, or what is left of the time is over."""
        if not notices.wait(min(self._pause, left)):
            self._pause *= 2
            return
        is_first = self._pause > LOOK_SECONDS
        self._pause = FIRST_LOOK_SECONDS if is_first else min(2 * self._pause, LOOK_SECONDS)
        time.sleep(min(self._pause, left))

    def _has_changed(self) -> bool:
        """Tell whether the file has another version than the last time, or is busy."""
        before, self._version = self._version, _data_version(self._connection)
        return self._version is None or self._version != before

    def hears(self, gives_up: Callable[[], bool]) -> bool:
        return True

    def close(self) -> None:
        if self._notices is not None:
            self._notices.close()
        self._connection.close()


def _data_version(connection: BaseDatabaseWrapper) -> int | None:
    """Return the file's version, None while it is busy: then it is being changed."""
    with connection.wrap_database_errors:
        try:
            row = connection.connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                return None
            raise
    version: int = row[0]
    return version


def _file_of(connection: BaseDatabaseWrapper) -> str:
    """Return the path of a database's file, empty for one in memory."""
    with connection.wrap_database_errors:
        file: str = connection.connection.execute("PRAGMA database_list").fetchone()[2]
    return file


def _notices_of(connection: BaseDatabaseWrapper) -> FileNotices | None:
    """Return what tells of writes to a database's files, None where the system does not."""
    file = _file_of(connection)
    if not file:  # it is in memory
        return None
    try:
        return FileNotices([Path(file), Path(f"{file}-wal")])
    except OSError:
        return None
