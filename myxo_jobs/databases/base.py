"""What the queue asks of a database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Literal

import msgspec
from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs.databases.floors import Floor

# When a job is due: now (None), in so many seconds, or at an aware moment.
Due = float | datetime | None

ValueType = Literal["number", "text"]

# What a claim does about a suspect, a job whose last claim ended with its lease: take it
# (alone), take it only if its worker is known to be dead and else what stands before it,
# or pass it by.
OnSuspect = Literal["take", "stop", "skip"]


# What a claim empties in the row of a kept job: columns that tell of an earlier end, and
# progress, since each attempt starts without.
EMPTIED = ", ".join(
    f"{column} = NULL"
    for column in (
        "completed_at",
        "duration_ms",
        "result",
        "expires_at",
        "reason",
        "message",
        "progress_done",
        "progress_total",
        "progress_note",
    )
)
# The first and the last 19 attempts stay in the log of a job.
LOGGED_ATTEMPTS = 20

# What an insert writes into the row of a job that will be kept.
KEPT_NAMES = ("uid", "owner_kind", "owner_id", "preferred_name", "language", "time_zone")

# What a put does where its key is there. The conflict is named, so that only the key
# can be the reason for no row; SQLite knows the index by its condition, in the order in
# which Django wrote it.
ON_KEY = "ON CONFLICT (key) WHERE due IS NOT NULL AND key IS NOT NULL"
KEEP_THAT = f"{ON_KEY} DO NOTHING"
RUN_THAT_AGAIN = f"""{ON_KEY} DO UPDATE SET
    payload = CASE WHEN myxo_jobs.worker = '' THEN excluded.payload ELSE myxo_jobs.payload END,
    again = CASE WHEN myxo_jobs.worker = '' THEN NULL ELSE excluded.payload END
WHERE NOT myxo_jobs.failed AND myxo_jobs.topic = excluded.topic"""


class Row(msgspec.Struct, frozen=True):
    """A job as a put writes it; every other column has its default."""

    topic: str
    payload: str
    key: str | None
    priority: int


class KeptColumns(msgspec.Struct, frozen=True):
    """What a put writes into the row of a kept job besides."""

    uid: str
    owner_kind: str | None = None
    owner_id: str | None = None
    preferred_name: str | None = None
    language: str | None = None
    time_zone: str | None = None


class Claimed(msgspec.Struct, frozen=True):
    """What a claim took, and where the next one may begin."""

    #: (id, payload, key, attempts, created_at, suspect) of each, in the order to run them.
    rows: list[tuple[int, str, str | None, int, Any, bool]]
    floors: Sequence[Floor]
    #: The uid of each, by id, where they were asked for.
    uids: Mapping[int, str] = {}
    #: Of the suspect, if one was claimed: what stood behind the slash of its last token.
    mark: str = ""
    #: The ids of those that somebody cancelled in an earlier claim, which did not end them.
    cancelled: Collection[int] = ()


class Listener(ABC):
    """A connection that learns of new jobs, once `hears` was true. Used by one thread."""

    @abstractmethod
    def wait(self, seconds: float) -> set[str] | None:
        """Return the topics that got jobs, None for "any topic", empty after `seconds`.

        Raises OperationalError or InterfaceError when the connection is gone.
        """

    @abstractmethod
    def hears(self, gives_up: Callable[[], bool]) -> bool:
        """Tell whether a wake-up sent by another connection arrives here.

        Takes seconds when none does; `gives_up` is asked meanwhile whether to leave off.
        """

    @abstractmethod
    def close(self) -> None: ...


class Database(ABC):
    """One kind of database. Moments are its clock's, at the statement.

    A claim is known by the pair (job id, token), and *held* while the row has that
    id and that token. Statements that end or renew claims check it where they
    write, and never wait for a row that somebody else has locked: they return the
    ids they changed, and the caller comes back to the rest.
    """

    #: Whether a put sends wake-ups; otherwise the listener sees the put itself.
    sends_wakeups: bool
    #: Whether another connection can write while a transaction that wrote is open.
    can_write_beside: bool
    #: OPTIONS of the worker's own connections that the project does not give.
    own_options: Mapping[str, Any] = {}
    #: SQL of the statement's moment.
    now: str
    #: SQL of "neither failed nor done", by which the claim index is used.
    waiting: str

    # -- connections ---------------------------------------------------------

    def open(self, alias: str) -> BaseDatabaseWrapper:
        """Connect on the worker's own account: beside Django's connections, outside a pool.

        Raises OperationalError when the database cannot be reached.
        """
        settings = dict(connections[alias].settings_dict)
        options = self.own_options | settings["OPTIONS"]
        options.pop("pool", None)
        settings |= {"CONN_MAX_AGE": None, "OPTIONS": options}
        connection: BaseDatabaseWrapper = type(connections[alias])(settings, alias=alias)
        connection.inc_thread_sharing()  # whoever stops a thread may close its connection
        connection.queries_log = deque(maxlen=0)  # else it grows when DEBUG is on
        try:
            connection.ensure_connection()
        except OSError as error:
            # As when no descriptor is left for what psycopg waits with: an outage like any.
            raise OperationalError(str(error)) from error
        return connection

    @abstractmethod
    def is_fit(self, connection: BaseDatabaseWrapper) -> bool:
        """Tell whether a connected, idle connection is open and in no transaction."""

    @abstractmethod
    def leaves_traces(self, sql: str) -> bool:
        """Tell whether a statement changes its session beyond its own end."""

    @abstractmethod
    def atomic_job(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
        """Open the transaction of an atomic job: READ COMMITTED, or IMMEDIATE on SQLite."""

    def complaint(self, connection: BaseDatabaseWrapper) -> str:
        """Return what a person should do something about, empty while all is well.

        Asked now and then, by a connection that the worker has opened.
        """
        return ""

    def let_others_write(  # noqa: B027 - not abstract: most databases have room for all
        self, connection: BaseDatabaseWrapper, seconds: float
    ) -> None:
        """After writes of a worker's loop that took so long: wait, so that others can write.

        By the connection that wrote. Nothing to do where all can write at once.
        """

    # -- put -----------------------------------------------------------------

    @abstractmethod
    def insert(
        self, connection: BaseDatabaseWrapper, row: Row, due: Due, *, again: bool = False
    ) -> int | None:
        """Insert a job; return its id, or None when its key is there. One statement.

        With `again` a waiting job of the key and topic takes the payload, and a claimed
        one keeps it in its column `again`; both return their id.
        """

    @abstractmethod
    def insert_kept(
        self, connection: BaseDatabaseWrapper, row: Row, kept: KeptColumns, due: Due
    ) -> int | None:
        """Insert a job with its columns as a kept one; as `insert` otherwise."""

    @abstractmethod
    def insert_many(self, connection: BaseDatabaseWrapper, rows: Sequence[Row], due: Due) -> int:
        """Insert jobs, but for those whose key is there; return how many."""

    @abstractmethod
    def notify(self, connection: BaseDatabaseWrapper, topics: Iterable[str]) -> None:
        """Tell idle workers that these topics have new jobs."""

    # -- SQL -----------------------------------------------------------------

    @abstractmethod
    def after(self, seconds: str) -> str:
        """Return the SQL of the moment so many seconds (SQL, too) after the statement's."""

    @abstractmethod
    def larger_of(self, one: str, other: str) -> str:
        """Return the SQL of the larger of two values."""

    @abstractmethod
    def milliseconds_since(self, moment: str) -> str:
        """Return the SQL of the whole milliseconds from a moment (SQL, too) to the statement."""

    @abstractmethod
    def logged(self, exception: str, traceback: str) -> str:
        """Return the SQL of `attempt_log` with the attempt that ends now: JSON text.

        For `update_held`: `exception` and `traceback` are SQL of texts. Of more than 20
        attempts the first and the last 19 stay.
        """

    # -- claims --------------------------------------------------------------

    @abstractmethod
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
        """Claim up to `limit` due jobs of `topic` for `lease` seconds, under `token`.

        Reads `key` and `created_at` only if `told`, since a driver takes longer for a
        moment than for the rest of a row. Begins at the floors, None for the beginning,
        and sees the priorities that have one. A claim that has to wait for a
        lock takes no suspect whose lease ended meanwhile: its holder had to wait, too.
        With `uids`, as many as `limit`, the jobs are kept ones: each without a uid gets one
        of them, and the columns of an earlier end and of its progress are emptied.
        A request put with `again` is a new job: nobody has cancelled that.
        """

    @abstractmethod
    def one_claim_at_once(
        self, connection: BaseDatabaseWrapper, topic: str
    ) -> AbstractContextManager[Any]:
        """Make a block one transaction that no other such block of the topic overlaps.

        Each statement in it sees what those before it have committed.
        """

    @abstractmethod
    def look(
        self,
        connection: BaseDatabaseWrapper,
        topics: Mapping[str, Sequence[Floor] | None],
        horizon: float,
    ) -> dict[str, float]:
        """Return the topics with a job due within `horizon` seconds, and in how many.

        0 means that one can be claimed now. One statement for all topics, each from its
        floors, None for the beginning.
        """

    @abstractmethod
    def delete_held(
        self, connection: BaseDatabaseWrapper, held: Sequence[tuple[int, str]]
    ) -> set[int]:
        """Delete held jobs that were not put again; return the ids of those deleted.

        Does not wait for the drive.
        """

    @abstractmethod
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
        """Update held jobs that meet `condition`; return the ids of those updated.

        `assignments` is SQL. Each of `held` is (id, token, *values), and `held.name` in
        the SQL one of its values.
        With `flush` the commit waits for the drive as the project's setting says.
        """

    @abstractmethod
    def update_at_once(
        self,
        connection: BaseDatabaseWrapper,
        job_id: int,
        assignments: str,
        values: Sequence[Any],
        condition: str,
    ) -> bool:
        """Update a job that meets `condition`, unless that means waiting for somebody.

        On a connection of the project's; SQL as its cursor takes it. Tells whether it was.
        """

    @abstractmethod
    def one_transaction(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[Any]:
        """Make the statements of a block one transaction, or a part of the open one.

        Also on a connection of the worker's own, which Django's `atomic` does not know.
        """

    @abstractmethod
    def still_held(
        self,
        connection: BaseDatabaseWrapper,
        held: Sequence[tuple[int, str]],
        *,
        condition: str = "true",
    ) -> set[int]:
        """Return the ids of those that are held, whoever has their rows locked.

        Of those that meet `condition`, which is SQL.
        """

    @abstractmethod
    def listen(self, alias: str) -> Listener:
        """Connect a listener. Raises OperationalError when the database cannot be reached."""

    # -- schema --------------------------------------------------------------

    def tune_table(self) -> Sequence[str]:
        """Return the statements that set the table's storage parameters."""
        return ()
