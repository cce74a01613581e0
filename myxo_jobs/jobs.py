"""`Jobs`: the public door. Put jobs in, and act on those that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections
from django.db.models import DateTimeField
from django.utils import timezone

from myxo_jobs.errors import seconds_of
from myxo_jobs.handlers import PRIORITIES, registry
from myxo_jobs.payloads import check_key

if TYPE_CHECKING:
    from myxo_jobs.databases import Due
    from myxo_jobs.models import Job

# A project makes its Jobs where it likes, also before Django has loaded any model,
# so the rooms that need the model are imported by the calls that use them.


class Transaction(Enum):
    """Whose transaction a put is part of."""

    CALLER = "caller"


CALLER: Final = Transaction.CALLER


class Jobs:
    """The queue of one database.

    `using` is an alias of DATABASES; by default the one that the routers choose for
    writes of the job model, asked at each call.
    """

    def __init__(self, using: str | None = None) -> None:
        self._using = using

    @property
    def using(self) -> str:
        """The alias of the queue's database."""
        from myxo_jobs import queue

        return self._using or queue.alias()

    def put(
        self,
        request: msgspec.Struct,
        *,
        key: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        again: bool = False,
        tx: Transaction | None = CALLER,
    ) -> int | None:
        """Add a job; return its id, or None when a job with its key is in the queue.

        Inside `transaction.atomic()` on the queue's database the job commits or rolls
        back with the caller's writes; outside, it commits at once. `tx=None` commits it
        on its own whatever block the caller is in, by a connection opened for it.

        `delay` counts in seconds (or a timedelta) from the statement; `at` is a moment as
        a DateTimeField takes it. `priority` is the handler's unless given.

        With `again` a key that is in the queue is no reason to do nothing: a waiting job
        takes this request and keeps its place, a running one is followed by one more run
        with the newest such request; both return their id. A failed job, or one of another
        Struct, keeps the key.

        Raises PayloadInvalid or PayloadTypeInvalid, naming the field, for a request that
        would not come back as it is; ValueError or TypeError for the other arguments;
        both before any SQL. Raises Django's OperationalError as any write can: then
        nothing was put.
        """
        from myxo_jobs import queue

        handler = registry.of_request(request)
        key = None if key is None else check_key(key)
        due = _due(delay, at)
        priority = handler.priority if priority is None else _check_priority(priority)
        _check_tx(tx)
        put = queue.put if tx is CALLER else queue.put_alone
        connection = connections[self.using]
        return put(connection, handler, request, key=key, due=due, priority=priority, again=again)

    async def aput(
        self,
        request: msgspec.Struct,
        *,
        key: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        again: bool = False,
        tx: Transaction | None = CALLER,
    ) -> int | None:
        """Add a job from async code; see `put`."""
        return await sync_to_async(self.put)(
            request, key=key, delay=delay, at=at, priority=priority, again=again, tx=tx
        )

    def put_many(
        self,
        requests: Iterable[msgspec.Struct],
        *,
        key: Callable[[msgspec.Struct], str | None] | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        priority: int | None = None,
    ) -> int:
        """Add a job for each request, of one Struct or several; return how many were put.

        One transaction. `key` is a function of a request; the first request of a key
        wins, and none is put whose key is in the queue. Raises as `put` does, and then
        puts nothing.
        """
        from myxo_jobs import queue
        from myxo_jobs.databases import Row

        due = _due(delay, at)
        if priority is not None:
            _check_priority(priority)
        rows = []
        for request in requests:
            handler = registry.of_request(request)
            name = key(request) if key else None
            rows.append(
                Row(
                    topic=handler.topic,
                    payload=handler.codec.encode(request),
                    key=None if name is None else check_key(name),
                    priority=handler.priority if priority is None else priority,
                )
            )
        if not rows:
            return 0
        return queue.put_many(connections[self.using], rows, due=due)

    def get(self, job_id: int) -> Job | None:
        """Return the row of a job that is in the queue, None when it has left."""
        from myxo_jobs.models import Job

        return Job.objects.using(self.using).filter(pk=job_id).first()

    def retry(self, job_id: int) -> bool:
        """Run a failed job again, now, with all its attempts; tell whether it was failed."""
        from myxo_jobs import queue

        return bool(queue.retry_failed(self.using, [job_id]))

    def cancel(self, job_id: int) -> bool:
        """Fail a job that waits, or ask one that runs to stop; tell whether it was either."""
        from myxo_jobs import queue

        return queue.cancel(self.using, job_id)

    def discard(self, job_id: int) -> bool:
        """Delete a job in any state; tell whether it was there. A running one ends unrecorded."""
        from myxo_jobs import queue

        return bool(queue.discard(self.using, [job_id]))


def _due(delay: float | timedelta | None, at: datetime | None) -> Due:
    if at is None:
        return None if delay is None else seconds_of(delay, "delay") or None
    if delay is not None:
        raise ValueError("delay and at are two answers to one question: give one of them")
    if not isinstance(at, datetime):
        raise TypeError(f"at takes a datetime, not {type(at).__name__}")
    if timezone.is_naive(at):
        at = DateTimeField(name="at").get_prep_value(at)  # warns under USE_TZ, as a field does
        if timezone.is_naive(at):
            at = timezone.make_aware(at)
    try:
        moment = at.astimezone(UTC)
        moment.astimezone(UTC if settings.USE_TZ else timezone.get_default_timezone())
    except OverflowError:
        raise ValueError(f"at of {at} is beyond the years 1 to 9999") from None
    return moment


def _check_priority(priority: object) -> int:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise TypeError(f"priority takes a whole number, not {priority!r}")
    if priority not in PRIORITIES:
        raise ValueError(f"priority takes -100 to 100, not {priority}")
    return priority


def _check_tx(tx: object) -> None:
    if tx is not None and tx is not CALLER:
        raise TypeError(f"tx takes CALLER or None, not {tx!r}")
