"""The life of a job, in order: put, claim, renew, complete or keep, retry, fail, give back, expire.

Every change of a job's state is here. Each has one shape: change what you may
change, in the statement that checks that you may; what it returns says whether you
were allowed. The check is on the claim, which is the job's id and a token that no
other claim ever had.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from functools import partial
from typing import Any, Literal, Protocol, cast

import msgspec
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q, QuerySet

from myxo_jobs.databases import (
    Database,
    Due,
    Floors,
    KeptColumns,
    OnSuspect,
    Row,
    ValueType,
    database_of,
)
from myxo_jobs.errors import Cancelled, ClaimLost, JobTimeout, OwnTransactionImpossible, WorkerLost
from myxo_jobs.handlers import Dials, Handler, Notes, registry
from myxo_jobs.models import Job
from myxo_jobs.payloads import storable

if sys.version_info >= (3, 14):
    from uuid import uuid7 as uuid7
else:
    from uuid6 import uuid7 as uuid7

logger = logging.getLogger("myxo_jobs")

ID_RANGE = range(1, 2**63)  # SQLite's driver refuses larger numbers
# A wake-up is not repeated within this window: a worker that found work keeps
# looking for longer than that before it sleeps.
WAKE_WINDOW_SECONDS = 0.05
PROGRESS_NOTE_CHARACTERS = 255
# For so long nobody else cleans up the same job, nor tries again what has failed.
HOLD_SECONDS = 300.0


# How a run ended whose worker could not tell: with its process, or by its timeout.
LastEnd = Literal["", "lost", "late"]


class Claim(msgspec.Struct, eq=False):
    """A job taken for one lease."""

    job_id: int
    token: str
    handler: Handler
    payload: str
    key: str | None
    attempt: int
    created_at: Any  # as the driver gave it
    # Its last claim ended with its lease: perhaps it killed its worker.
    suspect: bool
    # When the lease ends by this process's monotonic clock, taken before the claim.
    lease_ends: float
    # Asked for by the handler: the lease lasts at least until then, on the same clock.
    extended_until: float = 0.0
    # Of a suspect: how its last run ended, if that is known; its error stands in the row.
    last_end: LastEnd = ""
    # Of a kept job alone: its name towards its owner.
    uid: str | None = None
    notes: Notes | None = None
    # Whether somebody asked the job to stop; and what stops an async run then.
    cancelled: bool = False
    stop: Callable[[], object] | None = None

    @property
    def held(self) -> tuple[int, str]:
        return self.job_id, self.token


class Held(Protocol):
    """Whatever knows a claim: the job's id and the token."""

    @property
    def held(self) -> tuple[int, str]: ...


def present(connection: BaseDatabaseWrapper, handlers: Iterable[Handler]) -> list[Handler]:
    """Return handlers with their dials as they stand now; one question to each who knows."""
    handlers = list(handlers)
    topics: defaultdict[Callable[..., Any], list[str]] = defaultdict(list)
    for one in handlers:
        if one.dials is not None:
            topics[one.dials].append(one.topic)
    stand: dict[str, Dials] = {}
    for ask, asked in topics.items():
        stand.update(ask(connection, asked))
    return [one.turned(stand[one.topic]) if one.topic in stand else one for one in handlers]


class LimitReached(Exception):  # noqa: N818 - named as a fact; it never leaves the worker
    """As many jobs of a topic as may run at once are claimed."""


class Tokens:
    """The tokens of one worker: a random prefix of its start, and a counter.

    Never made of host, process or attempt number: a restarted container repeats those.
    """

    def __init__(self) -> None:
        self.prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self.prefix}.{next(self._numbers)}"


def tell(
    level: int, claim: Claim, words: str, *values: object, error: BaseException | None = None
) -> None:
    """Log an event of a job: one line, never its payload."""
    topic = claim.handler.topic
    logger.log(
        level,
        "job=%s topic=%s attempt=%s " + words,
        claim.job_id,
        topic,
        claim.attempt,
        *values,
        exc_info=error,
        extra={"job": claim.job_id, "topic": topic, "attempt": claim.attempt},
    )


def alias() -> str:
    """Return the alias of the database that the routers choose for writes of jobs."""
    return router.db_for_write(Job)


# -- put ----------------------------------------------------------------------


def put(
    connection: BaseDatabaseWrapper,
    handler: Handler,
    request: msgspec.Struct,
    *,
    key: str | None,
    due: Due,
    priority: int,
    again: bool = False,
) -> int | None:
    """Add a job in the connection's transaction; return its id, or None if its key is there.

    With `again` a waiting job of the key takes the request, and a claimed one keeps it
    for when its claim ends; both return its id.
    """
    row = Row(handler.topic, handler.codec.encode(request), key, priority)
    job_id = database_of(connection).insert(connection, row, due, again=again)
    if job_id is None:
        _tell_who_holds(connection, key)
        return None
    _tell_of_put(job_id, row.topic)
    wake(connection, [row.topic])
    return job_id


def _tell_of_put(job_id: int, topic: str) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "job=%s topic=%s attempt=0 put",
            job_id,
            topic,
            extra={"job": job_id, "topic": topic, "attempt": 0},
        )


def enqueue(connection: BaseDatabaseWrapper, row: Row, kept: KeptColumns, *, due: Due) -> str:
    """Add a job that will be kept, in the connection's transaction; return its uid.

    While a job of the same topic, owner and key waits or runs, return the uid of that one
    and add nothing. A failed one gives its key up; and where any other job holds it, as
    only a key made by hand can bring about, this one is added without.
    """
    while True:
        job_id = database_of(connection).insert_kept(connection, row, kept, due)
        if job_id is not None:
            _tell_of_put(job_id, row.topic)
            wake(connection, [row.topic])
            return kept.uid
        holder = _holder_of(connection, row.key)
        if holder is None:
            continue  # it has ended since
        if holder.failed:
            Job.objects.using(connection.alias).filter(pk=holder.pk, failed=True).update(key=None)
        elif (holder.topic, holder.owner_kind, holder.owner_id) != (
            row.topic,
            kept.owner_kind,
            kept.owner_id,
        ):
            row = msgspec.structs.replace(row, key=None)
        elif holder.uid is None:  # put by SQL
            unnamed = Job.objects.using(connection.alias).filter(pk=holder.pk, uid=None)
            unnamed.update(uid=kept.uid)
        else:
            return str(holder.uid)


def _holder_of(connection: BaseDatabaseWrapper, key: str | None) -> Job | None:
    columns = ("topic", "failed", "owner_kind", "owner_id", "uid")
    rows = Job.objects.using(connection.alias).filter(key=key, due__isnull=False)
    return rows.only(*columns).first()


def put_alone(
    connection: BaseDatabaseWrapper,
    handler: Handler,
    request: msgspec.Struct,
    *,
    key: str | None,
    due: Due,
    priority: int,
    again: bool = False,
) -> int | None:
    """Add a job in a transaction of its own, whatever block the connection is in.

    In a test case it joins the test's transaction, so that it goes with the test.
    Raises OwnTransactionImpossible where the database has one writer at a time.
    """
    can_write_beside = database_of(connection).can_write_beside
    blocks = connection.atomic_blocks
    of_the_test = [block for block in blocks if is_of_testcase(block)]
    if of_the_test and (can_write_beside or len(of_the_test) == len(blocks)):
        return put(connection, handler, request, key=key, due=due, priority=priority, again=again)
    if not can_write_beside and (blocks or not connection.get_autocommit()):
        raise OwnTransactionImpossible
    own = connections.create_connection(connection.alias)
    try:
        return put(own, handler, request, key=key, due=due, priority=priority, again=again)
    finally:
        own.close()


def put_many(connection: BaseDatabaseWrapper, rows: Sequence[Row], *, due: Due) -> int:
    """Add jobs in one transaction; return how many, those whose key was there not counted."""
    with _one_transaction(connection):
        count = database_of(connection).insert_many(connection, rows, due)
        topics = {row.topic for row in rows}
        if count:
            wake(connection, topics)
    names = ",".join(sorted(topics))
    logger.debug("topics=%s put jobs=%d", names, count)
    if count < len(rows):
        logger.info("topics=%s not put jobs=%d: their keys are there", names, len(rows) - count)
    return count


def _one_transaction(connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:
    """Make a block a transaction, or a part of the caller's.

    With autocommit off outside any block the caller's is open already; there `atomic`
    would make a savepoint, and on SQLite the release of the outermost one commits.
    """
    if connection.in_atomic_block or connection.get_autocommit():
        return transaction.atomic(using=connection.alias)
    return nullcontext()


def _tell_who_holds(connection: BaseDatabaseWrapper, key: str | None) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    rows = Job.objects.using(connection.alias).filter(key=key, due__isnull=False)
    holder = rows.values("id", "topic", "status", "attempts").first()
    if holder:
        logger.info(
            "key=%r not put: job=%s topic=%s attempt=%s holds it, %s",
            key,
            holder["id"],
            holder["topic"],
            holder["attempts"],
            holder["status"],
            extra={"job": holder["id"], "topic": holder["topic"], "attempt": holder["attempts"]},
        )


# -- wake ---------------------------------------------------------------------


class _WakeUp:
    """Sends one wake-up after the commit, for all the puts of a transaction."""

    def __init__(self, connection: BaseDatabaseWrapper, block: object) -> None:
        # Django names a callback by it when it has failed, and fails itself without.
        self.__qualname__ = type(self).__qualname__
        self.connection = connection
        self.block = block
        self.topics: set[str] = set()
        self.sent = False

    def __call__(self) -> None:
        self.sent = True
        _notify(self.connection, self.topics)


_last_wakeup: dict[tuple[str, str], float] = {}


def _notify(connection: BaseDatabaseWrapper, topics: Iterable[str]) -> None:
    now = time.monotonic()
    stale = [
        topic
        for topic in topics
        if now - _last_wakeup.get((connection.alias, topic), -1.0) > WAKE_WINDOW_SECONDS
    ]
    if stale:
        for topic in stale:
            _last_wakeup[connection.alias, topic] = now
        database_of(connection).notify(connection, stale)


def wake(connection: BaseDatabaseWrapper, topics: Collection[str]) -> None:
    """Wake idle workers once the connection's transaction has committed."""
    if not topics or not database_of(connection).sends_wakeups:
        return
    if not (connection.in_atomic_block or connection.get_autocommit()):
        return  # nobody will tell of the commit; polling finds the job
    # A test case wraps everything in blocks of its own: what stands for the
    # transaction is the outermost block of the code under test.
    block = next((b for b in connection.atomic_blocks if not is_of_testcase(b)), None)
    for entry in reversed(connection.run_on_commit):
        callback = entry[1]
        if isinstance(callback, _WakeUp) and callback.block is block and block is not None:
            if callback.sent:
                break
            callback.topics.update(topics)
            return
    wakeup = _WakeUp(connection, block)
    wakeup.topics.update(topics)
    connection.on_commit(wakeup, robust=True)


def is_of_testcase(block: object) -> bool:
    """Tell whether an atomic block is one that django.test.TestCase wraps around a test."""
    return getattr(block, "_from_testcase", False)


# -- claim --------------------------------------------------------------------


def claim(
    connection: BaseDatabaseWrapper,
    handler: Handler,
    limit: int,
    *,
    token: str,
    on_suspect: OnSuspect = "take",
    floors: Floors | None = None,
    joined: bool = False,
) -> list[Claim]:
    """Take up to `limit` due jobs of a handler, each for its lease.

    Highest `priority` first, then earliest `due`, then `id`; empty when nothing is
    due. A job whose lease is over is a suspect: taken alone and at its old place in
    the line, or not at all, by `on_suspect`. With `floors` it may pass by jobs that stand
    before them, until the next full pass. Moments are the database's. Raises
    RuntimeError inside an open transaction, unless `joined`, and LimitReached when as many
    jobs as the handler's `limit` are claimed already.
    Source: PostgreSQL manual, SELECT, "The Locking Clause".
    """
    if connection.in_atomic_block and not joined:
        raise RuntimeError("a claim inside a transaction would hold its rows until the commit")
    if handler.limit is not None:
        # Counted in a later statement than the one that got the lock: in the same one it
        # would not see the claims that were made while it waited.
        with database_of(connection).one_claim_at_once(connection, handler.topic):
            room = handler.limit - _claimed(connection, handler.topic, handler.limit)
            if room <= 0:
                raise LimitReached
            return _claim(connection, handler, min(limit, room), token, on_suspect, floors)
    return _claim(connection, handler, limit, token, on_suspect, floors)


_CLAIMED = """
SELECT count(*) FROM (
    SELECT 1 FROM myxo_jobs
    WHERE topic = %s AND {waiting} AND worker <> '' AND lease_until > {now} LIMIT %s
) AS claimed
"""


def _claimed(connection: BaseDatabaseWrapper, topic: str, most: int) -> int:
    """Return how many jobs of a topic are claimed, counted up to `most`."""
    statement = _sql(connection, _CLAIMED, waiting=database_of(connection).waiting)
    with connection.cursor() as cursor:
        cursor.execute(statement, [topic, most])
        return int(cursor.fetchone()[0])


def _claim(
    connection: BaseDatabaseWrapper,
    handler: Handler,
    limit: int,
    token: str,
    on_suspect: OnSuspect,
    floors: Floors | None,
) -> list[Claim]:
    before = time.monotonic()
    start = floors.at(before) if floors is not None else None
    claimed = database_of(connection).claim(
        connection,
        handler.topic,
        limit,
        lease=handler.lease,
        token=token,
        on_suspect=on_suspect,
        told=handler.takes_run,
        floors=start,
        uids=None if handler.keep is None else [str(uuid7()) for _ in range(limit)],
    )
    if floors is not None:
        floors.passed(start, claimed.floors, began=before, ended=time.monotonic())
    ends = before + handler.lease
    claims = [
        Claim(job_id, token, handler, payload, key, attempt, created_at, suspect, ends)
        for job_id, payload, key, attempt, created_at, suspect in claimed.rows
    ]
    for one in claims[:1]:
        if one.suspect and claimed.mark in ("lost", "late"):
            one.last_end = cast(LastEnd, claimed.mark)
    if claimed.cancelled:
        for one in claims:
            one.cancelled = one.job_id in claimed.cancelled
    if claimed.uids:
        for one in claims:
            one.uid = claimed.uids[one.job_id]
    if logger.isEnabledFor(logging.DEBUG):
        for one in claims:
            tell(logging.DEBUG, one, "claimed")
    return claims


def renew(connection: BaseDatabaseWrapper, claims: Sequence[Claim]) -> set[int]:
    """Make claims last their lease from now on; return the ids of those renewed.

    A claim that lasts longer already, because its handler asked for it, stays so.
    """
    before = time.monotonic()
    leases = [max(claim.handler.lease, claim.extended_until - before) for claim in claims]
    renewed = renew_for(connection, list(zip(claims, leases, strict=True)))
    for claim, lease in zip(claims, leases, strict=True):
        if claim.job_id in renewed:
            claim.lease_ends = max(claim.lease_ends, before + lease, claim.extended_until)
    return renewed


def renew_for(connection: BaseDatabaseWrapper, claims: Sequence[tuple[Held, float]]) -> set[int]:
    """Make claims last so many seconds from now on; return the ids of those renewed."""
    database = database_of(connection)
    lease_until = database.larger_of("lease_until", database.after("held.lease"))
    return database.update_held(
        connection,
        f"lease_until = {lease_until}",
        {"lease": "number"},
        [(*claim.held, lease) for claim, lease in claims],
        flush=False,
    )


_PROGRESS: dict[str, ValueType] = {"done": "number", "total": "number", "note": "text"}


def note_progress(connection: BaseDatabaseWrapper, claims: Sequence[Claim]) -> set[int]:
    """Write what runs have noted last into their rows; return the ids of those written."""
    noted = [(claim, claim.notes.newest) for claim in claims if claim.notes is not None]
    database = database_of(connection)
    written = database.update_held(
        connection,
        "progress_done = held.done, progress_total = held.total, progress_note = held.note, "
        f"updated_at = {database.now}",
        _PROGRESS,
        [(*claim.held, *_progress_row(newest)) for claim, newest in noted],
        flush=False,
    )
    for claim, newest in noted:
        if claim.notes is not None and claim.job_id in written:
            claim.notes.stored = newest
    return written


def _progress_of(claim: Held) -> tuple[float | None, float | None, str | None]:
    """Return what a run noted last, as values for its outcome."""
    notes = claim.notes if isinstance(claim, Claim) else None
    return _progress_row(notes.newest if notes is not None else None)


def _progress_row(
    noted: tuple[float, float | None, str] | None,
) -> tuple[float | None, float | None, str | None]:
    if noted is None:
        return None, None, None
    done, total, note = noted
    # Cut first: `storable` would leave out the middle.
    note = storable(note[:PROGRESS_NOTE_CHARACTERS], characters=PROGRESS_NOTE_CHARACTERS)
    return float(done), None if total is None else float(total), note


_LAST_PROGRESS = ", ".join(
    f"progress_{name} = CASE WHEN held.done IS NULL THEN progress_{name} ELSE held.{name} END"
    for name in _PROGRESS
)


def still_held(connection: BaseDatabaseWrapper, claims: Sequence[Held]) -> set[int]:
    """Return the ids of those claims that nobody has taken over and nobody deleted."""
    return database_of(connection).still_held(connection, [claim.held for claim in claims])


def notice_cancelled(connection: BaseDatabaseWrapper, claims: Iterable[Claim]) -> None:
    """Tell the runs of claims whose jobs were cancelled meanwhile."""
    unaware = [claim for claim in claims if not claim.cancelled]
    if not unaware:
        return
    held = [claim.held for claim in unaware]
    asked = database_of(connection).still_held(
        connection, held, condition="cancelled_at IS NOT NULL"
    )
    for claim in unaware:
        if claim.job_id in asked:
            claim.cancelled = True
            if claim.notes is not None:
                claim.notes.cancelled = True
            if claim.stop is not None:
                claim.stop()


# -- the ends of a claim ------------------------------------------------------
# Each takes what it may at once and returns the ids it ended: a row that somebody
# else has locked stays for later, one whose claim was lost is not ours to change.
# And each turns a job that was put again meanwhile into one that waits with its
# newest request, whatever became of the run.

_NEWEST = "payload = coalesce(again, payload), again = NULL"
_RELEASED = f"worker = '', lease_until = NULL, {_NEWEST}"


class Failure(msgspec.Struct, frozen=True):
    """An attempt that failed."""

    claim: Held
    error: str
    traceback: str
    # The class of what it raised: `module.Name`.
    exception: str = ""
    # For its owner, if the job has failed with it: why, in one word and in a sentence.
    reason: str = "error"
    message: str = ""
    pause: float = 0.0  # seconds before the next attempt
    cleaned: bool = True  # whether its cleanup came through


def _unless_again(value: str, otherwise: str) -> str:
    """Return the SQL of a value, or of another one where the job was put again."""
    return f"CASE WHEN again IS NULL THEN {value} ELSE {otherwise} END"


_BLAMED = (
    f"error = {_unless_again('held.error', repr(''))}, "
    f"traceback = {_unless_again('held.traceback', repr(''))}"
)


# A claim of a job that somebody has cancelled ends as a failure, and in no other of these
# ways; the worker learns of it when its outcome is not taken.
_UNLESS_CANCELLED = "(cancelled_at IS NULL OR again IS NOT NULL)"
_STILL_CANCELLED = "cancelled_at = CASE WHEN again IS NULL THEN cancelled_at END"


def _ended(database: Database) -> str:
    """Return the assignments that record the end of a job, or of one of its attempts."""
    return (
        f"completed_at = {database.now}, updated_at = {database.now}, cancelled_at = NULL, "
        f"duration_ms = {database.milliseconds_since('started_at')}"
    )


_LOCK_JOINED = "UPDATE myxo_jobs SET worker = worker WHERE id = %s AND worker = %s"
_DELETE_JOINED = "DELETE FROM myxo_jobs WHERE id = %s AND worker = %s AND again IS NULL"
_RESTART_JOINED = (
    f"UPDATE myxo_jobs SET {_RELEASED}, attempts = 0, cancelled_at = NULL "  # noqa: S608
    "WHERE id = %s AND worker = %s"
)


def complete(connection: BaseDatabaseWrapper, claims: Sequence[Claim]) -> set[int]:
    """Delete claimed jobs: they are done."""
    return database_of(connection).delete_held(connection, [claim.held for claim in claims])


def restart(connection: BaseDatabaseWrapper, claims: Sequence[Claim]) -> set[int]:
    """Make done jobs that were put again wait with their newest request; the others stay."""
    return database_of(connection).update_held(
        connection,
        f"{_RELEASED}, attempts = 0, cancelled_at = NULL",
        {},
        [claim.held for claim in claims],
        condition="again IS NOT NULL",
        flush=True,
    )


def keep(connection: BaseDatabaseWrapper, endings: Sequence[tuple[Claim, str | None]]) -> set[int]:
    """Keep done jobs until they expire: (claim, result as JSON text). Their keys are free."""
    database = database_of(connection)
    log = database.logged("''", "''")
    return database.update_held(
        connection,
        f"{_RELEASED}, {_ended(database)}, due = {_unless_again('NULL', 'due')}, "
        f"attempts = {_unless_again('myxo_jobs.attempts', '0')}, result = held.result, "
        f"expires_at = {database.after('held.keep')}, attempt_log = {log}, {_LAST_PROGRESS}, "
        "item_count = held.items, bytes_in = held.bytes_in, bytes_out = held.bytes_out",
        {"result": "text", "keep": "number", **_PROGRESS, **_COUNTS},
        [
            (
                *claim.held,
                result,
                claim.handler.keep,
                *_progress_of(claim),
                *(_counts_in(result) if claim.handler.by_name else (None, None, None)),
            )
            for claim, result in endings
        ],
        flush=True,
    )


_COUNTS: dict[str, ValueType] = {"items": "number", "bytes_in": "number", "bytes_out": "number"}


class _Counts(msgspec.Struct, frozen=True):
    """What a service says in its result of how much it has done."""

    item_count: int | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    # Its own without a file, then of any type.
    file: Any = None
    file_bytes: Any = None


def _counts_in(result: str | None) -> tuple[int | None, int | None, int | None]:
    try:
        counts = msgspec.json.decode(result or "{}", type=_Counts)
    except msgspec.ValidationError:
        return None, None, None  # no dict, or one whose names mean something else
    bytes_out = counts.bytes_out
    if bytes_out is None and isinstance(counts.file, str):
        bytes_out = counts.file_bytes
    return counts.item_count, counts.bytes_in, bytes_out


def keep_joined(connection: BaseDatabaseWrapper, claim: Claim, result: str | None) -> None:
    """Keep a done job in the open transaction, so that its work and its end are one.

    Waits and raises as `complete_joined` does.
    """
    with connection.cursor() as cursor:
        cursor.execute(_LOCK_JOINED, claim.held)
        if not cursor.rowcount:
            raise ClaimLost(claim.job_id, claim.attempt)
    keep(connection, [(claim, result)])


def complete_joined(connection: BaseDatabaseWrapper, claim: Claim) -> None:
    """Delete a claimed job in the open transaction, so that its work and its end are one.

    Waits for whoever has the row locked. Raises ClaimLost when the claim passed to
    another worker or the job was deleted: the work must then be rolled back.
    """
    with connection.cursor() as cursor:
        cursor.execute(_DELETE_JOINED, claim.held)
        if not cursor.rowcount:
            cursor.execute(_RESTART_JOINED, claim.held)
        if not cursor.rowcount:
            raise ClaimLost(claim.job_id, claim.attempt)


def retry(
    connection: BaseDatabaseWrapper, failures: Sequence[Failure], *, unless_cancelled: bool = False
) -> set[int]:
    """Make jobs wait for their next attempt."""
    database = database_of(connection)
    return database.update_held(
        connection,
        f"{_RELEASED}, {_BLAMED}, due = {_unless_again(database.after('held.pause'), 'due')}, "
        f"attempts = {_unless_again('myxo_jobs.attempts', '0')}, {_STILL_CANCELLED}, "
        f"attempt_log = {database.logged('held.exception', 'held.traceback')}",
        {"pause": "number", "error": "text", "traceback": "text", "exception": "text"},
        [(*one.claim.held, one.pause, one.error, one.traceback, one.exception) for one in failures],
        condition=_UNLESS_CANCELLED if unless_cancelled else "true",
        flush=True,
    )


def fail(connection: BaseDatabaseWrapper, failures: Sequence[Failure]) -> set[int]:
    """Keep jobs for a person, marked failed."""
    attempts = _unless_again("myxo_jobs.attempts", "0")
    log = database_of(connection).logged("held.exception", "held.traceback")
    return _fail(connection, failures, f"attempts = {attempts}, attempt_log = {log}")


def fail_unrun(connection: BaseDatabaseWrapper, failures: Sequence[Failure]) -> set[int]:
    """Keep jobs for a person that this claim did not run: it costs no attempt."""
    return _fail(connection, failures, f"attempts = {_one_less(database_of(connection))}")


_FAILURE: dict[str, ValueType] = {
    "error": "text",
    "traceback": "text",
    "exception": "text",
    "reason": "text",
    "message": "text",
    "keep": "number",
    "key_goes": "number",
    "unclean": "number",
    **_PROGRESS,
}


def _fail(connection: BaseDatabaseWrapper, failures: Sequence[Failure], others: str) -> set[int]:
    database = database_of(connection)
    key = _unless_again("CASE WHEN held.key_goes = 1 THEN NULL ELSE key END", "key")
    # Nobody claims a failed job: there the column tells that it is still to be cleaned up.
    unclean = f"CASE WHEN held.unclean = 1 AND again IS NULL THEN {database.now} END"
    return database.update_held(
        connection,
        f"worker = '', lease_until = {unclean}, {_NEWEST}, {_BLAMED}, {_ended(database)}, "
        f"failed = again IS NULL, key = {key}, "
        f"reason = CASE WHEN {_UNLESS_CANCELLED} THEN held.reason ELSE 'cancelled' END, "
        "message = held.message, "
        f"expires_at = {database.after('held.keep')}, {_LAST_PROGRESS}, {others}",
        _FAILURE,
        [_failure_row(one) for one in failures],
        flush=True,
    )


def _failure_row(one: Failure) -> tuple[Any, ...]:
    handler = one.claim.handler if isinstance(one.claim, Claim) else None
    keep = handler.keep if handler and handler.failed_expires else None
    key_goes = int(handler is not None and handler.failed_gives_up_key)
    texts = (one.error, one.traceback, one.exception, one.reason, one.message)
    numbers = (keep, key_goes, int(not one.cleaned))
    return (*one.claim.held, *texts, *numbers, *_progress_of(one.claim))


def tell_outcomes(
    connection: BaseDatabaseWrapper, ended: Iterable[tuple[Handler, int]]
) -> list[str]:
    """Call the handlers' `at_outcome` for jobs that have ended; put what they return.

    In the transaction that stores these ends. Returns the topics to wake after it.
    """
    topics = []
    for handler, job_id in ended:
        row = None if handler.at_outcome is None else handler.at_outcome(connection, job_id)
        if row is not None:
            database_of(connection).insert(connection, row, None)
            topics.append(row.topic)
    return topics


class Left(Held, Protocol):
    """A run that its process has left behind."""

    @property
    def pause(self) -> float: ...

    @property
    def is_last_attempt(self) -> bool: ...

    # Whether its final failure is left to a worker.
    @property
    def is_for_a_worker(self) -> bool: ...


def charge_timeouts(connection: BaseDatabaseWrapper, runs: Sequence[Left]) -> set[int]:
    """Record runs that their timeout could not end: failed attempts."""
    error = "JobTimeout: it took longer than its timeout, and could not be interrupted"
    return (
        fail(connection, _left(filter(_fails, runs), error, JobTimeout, "timeout"))
        | retry(connection, _left(filter(_goes_on, runs), error, JobTimeout))
        | expire(connection, _left(filter(_fails_later, runs), error, JobTimeout), "late")
    )


def charge_deaths(connection: BaseDatabaseWrapper, runs: Sequence[Left], cause: str) -> set[int]:
    """Record runs whose worker died: the attempt counts, and the next one can start now."""
    error = f"WorkerLost: {cause}"
    others = [run for run in runs if not _fails(run)]
    return fail(connection, _left(filter(_fails, runs), error, WorkerLost, "lost")) | expire(
        connection, _left(others, error, WorkerLost), "lost"
    )


def _goes_on(run: Left) -> bool:
    return not run.is_last_attempt


def _fails(run: Left) -> bool:
    return run.is_last_attempt and not run.is_for_a_worker


def _fails_later(run: Left) -> bool:
    """Tell whether a worker has to fail the job: it claims it, and finds no attempt left."""
    return run.is_last_attempt and run.is_for_a_worker


def _left(
    runs: Iterable[Left], error: str, kind: type[BaseException], reason: str = ""
) -> list[Failure]:
    exception = f"{kind.__module__}.{kind.__qualname__}"
    return [Failure(run, error, "", exception, reason, pause=run.pause) for run in runs]


def snooze(connection: BaseDatabaseWrapper, naps: Sequence[tuple[Claim, float]]) -> set[int]:
    """Make jobs wait so many seconds; the attempt does not count."""
    database = database_of(connection)
    return database.update_held(
        connection,
        f"{_RELEASED}, due = {_unless_again(database.after('held.pause'), 'due')}, "
        f"attempts = {_one_less(database)}, {_STILL_CANCELLED}",
        {"pause": "number"},
        [(*claim.held, pause) for claim, pause in naps],
        condition=_UNLESS_CANCELLED,
        flush=True,
    )


def expire(
    connection: BaseDatabaseWrapper, losses: Sequence[Failure], mark: LastEnd = "lost"
) -> set[int]:
    """End the leases of a dead worker's jobs now. They are suspects then.

    As in `leave`, nobody has the token that stays behind, and its mark tells so.
    """
    database = database_of(connection)
    return database.update_held(
        connection,
        f"worker = worker || '/{mark}', lease_until = {database.now}, "
        "error = held.error, traceback = '', "
        f"attempt_log = {database.logged('held.exception', repr(''))}",
        {"error": "text", "exception": "text"},
        [(*loss.claim.held, loss.error, loss.exception) for loss in losses],
        flush=True,
    )


def give_back(
    connection: BaseDatabaseWrapper,
    claims: Sequence[Held],
    *,
    only_over: bool = False,
    unless_cancelled: bool = False,
) -> set[int]:
    """Let others have jobs now, at their old place in the line; the attempt does not count.

    With `only_over` only those whose lease is over: their worker will not start them.
    """
    database = database_of(connection)
    condition = f"lease_until <= {database.now}" if only_over else "true"
    if unless_cancelled:
        condition = _UNLESS_CANCELLED
    return database.update_held(
        connection,
        f"{_RELEASED}, attempts = {_one_less(database)}, {_STILL_CANCELLED}",
        {},
        [claim.held for claim in claims],
        condition=condition,
        flush=True,
    )


def leave(connection: BaseDatabaseWrapper, claims: Sequence[Held]) -> set[int]:
    """Give back suspects that were not started; the attempt does not count.

    Their leases end now: given back plainly, they would be suspects no more, be claimed
    beside others again and, with their attempts used up, once too often. Nobody has the
    token that stays behind.
    """
    database = database_of(connection)
    return database.update_held(
        connection,
        f"worker = worker || '/left', lease_until = {database.now}, "
        f"attempts = {_one_less(database)}",
        {},
        [claim.held for claim in claims],
        flush=True,
    )


def held_under(connection: BaseDatabaseWrapper, prefix: str) -> list[tuple[int, str]]:
    """Return (id, token) of all claims of one worker. A walk over the whole table."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id, worker FROM myxo_jobs WHERE worker LIKE %s AND worker NOT LIKE %s",
            [f"{prefix}.%", "%/%"],
        )
        return list(cursor.fetchall())


def _one_less(database: Database) -> str:
    # Not below 0: an operator may have reset the column meanwhile.
    return _unless_again(database.larger_of("myxo_jobs.attempts - 1", "0"), "0")


# -- the end of a kept job ----------------------------------------------------


def apart(row: Job) -> AbstractContextManager[object]:
    """Keep what the project's code does to the database from breaking the open transaction."""
    alias = row._state.db or "default"
    return transaction.atomic(using=alias) if connections[alias].in_atomic_block else nullcontext()


def clean_up(handler: Handler, row: Job) -> bool:
    """Call a handler's cleanup for a job that has ended; tell whether it came through."""
    if handler.cleanup is None:
        return True
    try:
        with apart(row):
            Context().run(handler.cleanup, row)
    except BaseException as error:  # as around a handler: nothing it raises is about us
        words = "job=%s topic=%s attempt=%s cleanup failed"
        _tell_of_fault(row, words, error)
        return False
    return True


def explain(handler: Handler, row: Job, error: BaseException) -> str:
    """Return what a handler has to say to the owner of a job that fails; empty if nothing."""
    if handler.explain is None:
        return ""
    try:
        with apart(row):
            return storable(Context().run(handler.explain, row, error), characters=2_000)
    except BaseException as raised:  # as around a handler
        words = "job=%s topic=%s attempt=%s explain failed"
        _tell_of_fault(row, words, raised)
        return ""


def _tell_of_fault(row: Job, words: str, error: BaseException) -> None:
    logger.error(
        words,
        row.pk,
        row.topic,
        row.attempts,
        exc_info=error,
        extra={"job": row.pk, "topic": row.topic, "attempt": row.attempts},
    )


_EXPIRED = "expires_at <= {now} AND (failed OR due IS NULL)"
_SLICE = f"""
SELECT id FROM myxo_jobs
WHERE topic IN ({{topics}}) AND {_EXPIRED} AND (lease_until IS NULL OR lease_until <= {{now}})
ORDER BY expires_at LIMIT %s
"""  # noqa: S608
_REMOVE = f"DELETE FROM myxo_jobs WHERE id IN ({{ids}}) AND {_EXPIRED} RETURNING id"  # noqa: S608
# A failed row has no claim: it may be cleaned up twice, which is harmless.
_HOLD = f"""
UPDATE myxo_jobs SET
    worker = CASE WHEN failed THEN '' ELSE %s END, lease_until = {{lease_until}}
WHERE id = %s AND {_EXPIRED}
    AND (lease_until IS NULL OR lease_until <= {{now}} OR worker = {{paused}})
"""  # noqa: S608
_REMOVE_HELD = f"""
DELETE FROM myxo_jobs WHERE id = %s AND (failed OR worker = %s) AND {_EXPIRED}
"""  # noqa: S608


def expired(connection: BaseDatabaseWrapper, topics: Sequence[str], limit: int) -> list[int]:
    """Return ended jobs that have expired, the longest first, but for those being cleaned up."""
    places = ", ".join(["%s"] * len(topics))
    with connection.cursor() as cursor:
        cursor.execute(_sql(connection, _SLICE, topics=places), [*topics, limit])
        return [row[0] for row in cursor.fetchall()]


def remove_expired(connection: BaseDatabaseWrapper, job_ids: Sequence[int]) -> set[int]:
    """Delete those of some jobs that have expired; return their ids."""
    places = ", ".join(["%s"] * len(job_ids))
    with connection.cursor() as cursor:
        cursor.execute(_sql(connection, _REMOVE, ids=places), job_ids)
        return {row[0] for row in cursor.fetchall()}


def clean_up_and_remove(
    connection: BaseDatabaseWrapper,
    job_id: int,
    handler: Handler | None,
    token: str,
    *,
    at_once: bool = False,
) -> bool:
    """Clean up an expired job and delete it; tell whether it is gone.

    Not while somebody else cleans it up, or when its time was made longer. `at_once`: also
    one whose cleanup failed a short while ago.
    """
    if not _hold_expired(connection, job_id, token, at_once=at_once):
        return False
    row = Job.objects.using(connection.alias).filter(pk=job_id).first()
    if row is None:
        return True
    if handler is None or clean_up(handler, row):
        return _remove_held(connection, job_id, token)
    _let_go(connection, job_id, token)
    return False


def _hold_expired(
    connection: BaseDatabaseWrapper, job_id: int, token: str, *, at_once: bool
) -> bool:
    """Keep others from cleaning up an expired job for a while; tell whether it is ours."""
    paused = "''" if at_once else "NULL"
    statement = _sql(connection, _HOLD, lease_until=_after_given(connection), paused=paused)
    with connection.cursor() as cursor:
        cursor.execute(statement, [token, HOLD_SECONDS, job_id])
        return bool(cursor.rowcount)


def _let_go(connection: BaseDatabaseWrapper, job_id: int, token: str) -> None:
    """Hold an expired job no longer, whose cleanup failed; the sweep waits until it would end."""
    rows = Job.objects.using(connection.alias)
    rows.filter(pk=job_id, worker=token, due__isnull=True).update(worker="")


def _remove_held(connection: BaseDatabaseWrapper, job_id: int, token: str) -> bool:
    """Delete an expired job that is held; tell whether it was still both."""
    with connection.cursor() as cursor:
        cursor.execute(_sql(connection, _REMOVE_HELD), [job_id, token])
        return bool(cursor.rowcount)


_TOUCHED = """last_accessed_at = {now}, expires_at = CASE
    WHEN (failed OR due IS NULL) AND expires_at IS NOT NULL THEN {later} ELSE expires_at END"""
_IS_THERE = "(NOT failed AND due IS NOT NULL OR expires_at IS NULL OR expires_at > {now})"


def touch(
    connection: BaseDatabaseWrapper, job_id: int, seconds: float, *, at_once: bool = False
) -> bool:
    """Note that a job was fetched; one that has ended lasts so long from now at least.

    Tells whether there was one: one that has expired is gone. `at_once`: also false where
    somebody else has locked the row or the database, instead of waiting for them.
    """
    database = database_of(connection)
    later = database.larger_of("expires_at", _after_given(connection))
    assignments = _sql(connection, _TOUCHED, later=later)
    is_there = _sql(connection, _IS_THERE)
    if at_once:
        return database.update_at_once(connection, job_id, assignments, [seconds], is_there)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE myxo_jobs SET {assignments} WHERE id = %s AND {is_there}",  # noqa: S608 - constants
            [seconds, job_id],
        )
        return bool(cursor.rowcount)


_LINE = """
SELECT id FROM myxo_jobs
WHERE topic = %s AND {waiting} AND priority >= %s AND (due <= %s OR due <= {now})
ORDER BY priority DESC, due, id LIMIT %s
"""


def ahead_of(alias: str, job: Job, most: int) -> int:
    """Return how many jobs of its topic come before a waiting one, counted to `most`.

    Walks the line as a claim does, so what stands behind the job is not looked at.
    """
    connection = connections[alias]
    statement = _sql(connection, _LINE, waiting=database_of(connection).waiting)
    due = Job._meta.get_field("due").get_db_prep_value(job.due, connection)
    with connection.cursor() as cursor:
        cursor.execute(statement, [job.topic, job.priority, due, most])
        ids = [row[0] for row in cursor.fetchall()]
    return ids.index(job.pk) if job.pk in ids else len(ids)


_END_LIFE = "UPDATE myxo_jobs SET expires_at = {now} WHERE id = %s AND (failed OR due IS NULL)"


def remove_ended(alias: str, job_id: int) -> bool:
    """End the life of a job that has ended: clean it up, and delete it; tell whether it is gone.

    One whose cleanup fails is gone for its owner, and tried again by the sweep. In an open
    transaction it goes after the commit: what is cleaned up would not come back.
    """
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(_sql(connection, _END_LIFE), [job_id])
        has_ended = bool(cursor.rowcount)
    if has_ended and _in_block(connection):
        remove = partial(_remove_ended, connection, job_id)
        transaction.on_commit(remove, using=alias, robust=True)
        return True
    return _remove_ended(connection, job_id)


def _in_block(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether what is written may be rolled back, in a test by more than its end."""
    return not all(is_of_testcase(block) for block in connection.atomic_blocks)


def _remove_ended(connection: BaseDatabaseWrapper, job_id: int) -> bool:
    rows = Job.objects.using(connection.alias).filter(pk=job_id)
    topic = rows.values_list("topic", flat=True).first()
    if topic is None or _remove_clean(connection, job_id):
        return True
    handler = registry.of_topic(topic)
    return clean_up_and_remove(connection, job_id, handler, Tokens().next(), at_once=True)


def _remove_clean(connection: BaseDatabaseWrapper, job_id: int) -> bool:
    """Delete a failed job that has expired, if it was cleaned up when it failed."""
    with connection.cursor() as cursor:
        cursor.execute(_sql(connection, _REMOVE_CLEAN), [job_id])
        return bool(cursor.rowcount)


_REMOVE_CLEAN = """
DELETE FROM myxo_jobs WHERE id = %s AND failed AND lease_until IS NULL AND expires_at <= {now}
"""


def _after_given(connection: BaseDatabaseWrapper) -> str:
    """Return the SQL, for Django's cursor, of the moment that is a given value of seconds ahead."""
    parts = database_of(connection).after("%s").split("%s")
    return "%s".join(part.replace("%", "%%") for part in parts)


def _sql(connection: BaseDatabaseWrapper, statement: str, **parts: str) -> str:
    now = database_of(connection).now.replace("%", "%%")
    return statement.format(now=now, **parts)


# -- a person's part ----------------------------------------------------------


RETRY_FAILED = """\
UPDATE myxo_jobs SET failed = false, attempts = 0, lease_until = NULL,
    due = CASE WHEN due > {now} THEN {now} ELSE due END
WHERE failed AND"""


def retry_failed(alias: str, job_ids: Iterable[int]) -> set[int]:
    """Run failed jobs again, now, with all their attempts; return the ids of those that were."""
    connection = connections[alias]
    # One statement: one that reads before it writes can be refused by SQLite.
    statement = RETRY_FAILED.format(now=database_of(connection).now.replace("%", "%%"))
    with _one_transaction(connection):
        retried = _change(connection, statement, job_ids)
        if retried:
            wake(connection, set(retried.values()))
    return set(retried)


_CANCEL = """
UPDATE myxo_jobs SET
    failed = (worker = ''),
    lease_until = CASE WHEN worker = '' AND {is_cleaned} THEN {now} ELSE lease_until END,
    updated_at = {now},
    cancelled_at = CASE WHEN worker = '' THEN NULL ELSE coalesce(cancelled_at, {now}) END,
    completed_at = CASE WHEN worker = '' THEN {now} ELSE completed_at END,
    reason = CASE WHEN worker = '' THEN 'cancelled' ELSE reason END,
    message = CASE WHEN worker = '' THEN '' ELSE message END,
    error = CASE WHEN worker = '' THEN 'Cancelled' ELSE error END,
    traceback = CASE WHEN worker = '' THEN '' ELSE traceback END,
    due = CASE WHEN worker = '' AND due > {now} THEN {now} ELSE due END,
    key = CASE WHEN worker = '' AND {key_goes} THEN NULL ELSE key END,
    expires_at = CASE WHEN worker = '' THEN {expires_at} ELSE expires_at END
WHERE id = %s AND NOT failed AND due IS NOT NULL
RETURNING failed
"""


def cancel(alias: str, job_id: int) -> bool:
    """Fail a job that waits, or ask one that runs to stop; tell whether it was either."""
    connection = connections[alias]
    topics = Job.objects.using(alias).filter(pk=job_id).values_list("topic", flat=True)
    topic = topics.first() if job_id in ID_RANGE else None
    if topic is None:
        return False
    handler = registry.of_topic(topic)
    if handler is not None and not handler.cancellable:
        return False
    if handler is not None:
        (handler,) = present(connection, [handler])
    expires = handler.keep if handler is not None and handler.failed_expires else None
    expires_at = "NULL" if expires is None else database_of(connection).after(str(expires))
    statement = _sql(
        connection,
        _CANCEL,
        key_goes="true" if handler is not None and handler.failed_gives_up_key else "false",
        expires_at=expires_at.replace("%", "%%"),
        is_cleaned="true" if handler is not None and handler.cleanup is not None else "false",
    )
    with _one_transaction(connection):
        with connection.cursor() as cursor:
            cursor.execute(statement, [job_id])
            changed = cursor.fetchone()
        has_failed = changed is not None and bool(changed[0])
        if has_failed and handler is not None:
            _see_off_cancelled(alias, handler, job_id)
            wake(connection, tell_outcomes(connection, [(handler, job_id)]))
    return changed is not None


def _see_off_cancelled(alias: str, handler: Handler, job_id: int) -> None:
    """Tell its owner of a job that was cancelled while it waited; clean it up after the commit."""
    if not handler.sees_off:
        return
    rows = Job.objects.using(alias).filter(pk=job_id)
    row = rows.get()
    if handler.explain is not None:
        rows.update(message=explain(handler, row, Cancelled()))

    def clean_up_now() -> None:
        if clean_up(handler, row):
            rows.filter(failed=True).update(lease_until=None)

    transaction.on_commit(clean_up_now, using=alias)


def uncleaned(rows: QuerySet[Job]) -> QuerySet[Job]:
    """Return those jobs that have ended and are still to be cleaned up."""
    is_done = Q(failed=False, due__isnull=True)
    return rows.filter(is_done | Q(failed=True, lease_until__isnull=False))


def discard(alias: str, job_ids: Iterable[int]) -> set[int]:
    """Delete jobs in any state; return the ids of those that were there.

    A running one is not stopped, but its outcome is not recorded. A done one is cleaned up,
    and a failed one whose cleanup did not come through.
    """
    job_ids = list(job_ids)
    cleaned = {one.topic: one for one in registry if one.cleanup is not None}
    if cleaned:
        ended = uncleaned(Job.objects.using(alias).filter(topic__in=cleaned))
        for row in ended.filter(pk__in=[one for one in job_ids if one in ID_RANGE]):
            clean = partial(clean_up, cleaned[row.topic], row)
            if _in_block(connections[alias]):
                transaction.on_commit(clean, using=alias)
            else:
                clean()
    return set(_change(connections[alias], "DELETE FROM myxo_jobs WHERE", job_ids))


def _change(
    connection: BaseDatabaseWrapper, statement: str, job_ids: Iterable[int]
) -> dict[int, str]:
    """Run a statement on jobs; return the ids of those it met, and their topics."""
    ids = [job_id for job_id in job_ids if job_id in ID_RANGE]
    if not ids:
        return {}
    places = ", ".join(["%s"] * len(ids))
    with connection.cursor() as cursor:
        cursor.execute(f"{statement} id IN ({places}) RETURNING id, topic", ids)
        return dict(cursor.fetchall())
