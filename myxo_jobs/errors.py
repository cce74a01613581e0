"""What can go wrong, as a tree, and what a handler may raise to steer its job.

JobsError
├── SettingsInvalid             MYXO_JOBS has an unknown or ill-typed name
├── HandlerInvalid              @job was given something it cannot use
├── ServiceInvalid              register was given a class that cannot be a service
├── KindUnknown                 no service of that kind is registered
├── HandlerConflict             two handlers for one topic or one Struct
├── PayloadInvalid              the request would not come back as it went in
├── PayloadTypeInvalid          the request holds a value that JSON cannot
├── ResultInvalid               what a kept job's handler returned cannot be stored
├── OwnTransactionImpossible    tx=None inside a transaction on SQLite
├── ClaimLost                   somebody else holds the job now
└── WorkerLost                  the worker died while it ran the job
JobTimeout                      a run took longer than its handler's `timeout`
Cancelled                       somebody asked a kept job to stop
Steering
├── Retry
├── Snooze
└── GiveUp
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import TransactionManagementError


class JobsError(Exception):
    """The base of every error of myxo_jobs."""


class SettingsInvalid(JobsError, ImproperlyConfigured):
    """The setting MYXO_JOBS has a name it does not know, or a value of another type.

    The message names it. docs/reference/settings.md lists all of them.
    """


class HandlerInvalid(JobsError, ImproperlyConfigured, ValueError):
    """`@job` was given an argument, a Struct or a function that it cannot use."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"@job of {where}: {what}")


class ServiceInvalid(JobsError, ImproperlyConfigured, ValueError):
    """`register` was given a class with an attribute or a method that it cannot use."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"service {where}: {what}")


class KindUnknown(JobsError, ValueError, LookupError):
    """No service of that kind is registered in this process.

    Services stand in the `jobs` module of an installed app, decorated with `register`.
    """

    def __init__(self, kind: object, there: list[str]) -> None:
        super().__init__(
            f"no service of kind {kind!r} is registered; there are: {', '.join(there) or 'none'}"
        )


class HandlerConflict(JobsError, ImproperlyConfigured):
    """Two handlers claim the same topic, Struct or kind: give one another."""

    def __init__(self, what: str, first: str, second: str) -> None:
        super().__init__(f"two handlers for {what}: {first} and {second}")


class PayloadInvalid(JobsError, ValueError):
    """The request cannot be stored so that it comes back as it went in.

    Raised by a put before anything is written; by a worker, when a stored
    payload does not fit today's Struct: mend the one or the other, then retry.
    """


class PayloadTypeInvalid(JobsError, TypeError):
    """The request holds a value that JSON cannot: store its key, not the object."""


class ResultInvalid(JobsError, ValueError):
    """What the handler of a kept job returned cannot be stored as its result.

    JSON cannot hold it, or it is too long; the message names the place. The job fails at
    once: return less, or what JSON has, and put the rest elsewhere.
    """


class OwnTransactionImpossible(JobsError, TransactionManagementError):
    """`tx=None` inside a transaction on SQLite, which has one writer at a time.

    The put would wait for the very transaction that waits for it. Put the job
    in the caller's transaction, or after it.
    """

    def __init__(self) -> None:
        super().__init__(
            "tx=None inside a transaction on SQLite would wait for that transaction for ever: "
            "leave tx out, so that the job commits with it, or put the job after the block"
        )


class ClaimLost(JobsError):
    """The claim is no longer ours: its lease ended and the job was claimed again,
    or the job was deleted.

    The worker drops the outcome. Seen often, `lease` is shorter than the work.
    """

    def __init__(self, job_id: int, attempt: int) -> None:
        self.job_id = job_id
        self.attempt = attempt
        super().__init__(f"job {job_id} was claimed again after attempt {attempt}, or deleted")


class WorkerLost(JobsError):
    """The worker died while it ran the job, or could not renew its claim."""


class JobTimeout(BaseException):
    """The run took longer than the handler's `timeout`: a failed attempt.

    A BaseException, so that `except Exception` in a handler does not swallow it. What it
    interrupted may be in any state, so the worker's process ends after it.
    """


class Cancelled(BaseException):
    """Somebody cancelled the job: raised in it by `run.progress` and `run.track`.

    A BaseException, so that `except Exception` in a handler does not swallow it.
    """


class Steering(Exception):
    """What a handler raises to say how its job goes on."""


class Retry(Steering):
    """Run the job again after `delay` (seconds or timedelta; the handler's backoff if None).

    The attempt counts; on the last one the job fails.
    """

    def __init__(self, delay: float | timedelta | None = None) -> None:
        self.delay = None if delay is None else seconds_of(delay, "Retry(delay=…)")
        super().__init__("" if self.delay is None else f"in {self.delay:g} s")


class Snooze(Steering):
    """Run the job again after `delay` (seconds or timedelta); the attempt does not count."""

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = seconds_of(delay, "Snooze(delay)")
        super().__init__(f"for {self.delay:g} s")


class GiveUp(Steering):
    """Fail the job now, whatever attempts it has left."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason)


def seconds_of(value: float | timedelta, name: str) -> float:
    """Return a duration in seconds, 0 for a negative one.

    Raises TypeError for anything but a number or a timedelta, ValueError for
    NaN, infinity and waits beyond the year 9999; both name the argument.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    else:
        raise TypeError(f"{name} takes seconds or a timedelta, not {type(value).__name__}")
    if isinstance(seconds, float) and not math.isfinite(seconds):
        raise ValueError(f"{name} takes a finite number of seconds, not {value}")
    # A day is left for clocks that disagree: SQLite answers NULL beyond 9999.
    room = datetime.max.replace(tzinfo=UTC) - datetime.now(UTC) - timedelta(days=1)
    if seconds > room.total_seconds():
        raise ValueError(f"{name} of {value} ends beyond the year 9999")
    return float(max(seconds, 0))
