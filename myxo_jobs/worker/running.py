"""One run of one job: what the handler is given, and what became of it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context
from typing import Any, Literal

import msgspec
from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction

from myxo_jobs import queue
from myxo_jobs.databases import database_of
from myxo_jobs.errors import (
    Cancelled,
    ClaimLost,
    GiveUp,
    JobTimeout,
    PayloadInvalid,
    ResultInvalid,
    Retry,
    Snooze,
    WorkerLost,
)
from myxo_jobs.handlers import Notes, Run
from myxo_jobs.models import Job, moment_of
from myxo_jobs.payloads import describe, encode_result, path_of, storable
from myxo_jobs.queue import Claim
from myxo_jobs.worker.connections import HandlerConnections
from myxo_jobs.worker.limits import TimeLimits

Verb = Literal[
    "complete", "keep", "retry", "fail", "fail_unrun", "snooze", "give_back", "leave", "none"
]


# Ends after which a job stays for a person, once they are stored.
FINAL_FAILURES: frozenset[Verb] = frozenset(["fail", "fail_unrun"])
SEE_OFF_AGAIN_SECONDS = 0.5
ENDS = {"lost": "lost", "late": "timeout"}

_NOTHING = nullcontext()


class Outcome(msgspec.Struct, eq=False):
    """How a run ended, until it is stored."""

    claim: Claim
    verb: Verb
    pause: float = 0.0
    error: str = ""
    traceback: str = ""
    # The class of what was raised: `module.Name`.
    exception: str = ""
    # Of a failed job, for its owner.
    reason: str = "error"
    message: str = ""
    # Whether its cleanup came through.
    cleaned: bool = True
    # Of a kept job that is done, as JSON text.
    result: str | None = None
    raised: BaseException | None = None
    # How long the run took; None when it tells nothing about the next one.
    seconds: float | None = None
    # A statement that may have stored it was sent, and its answer never came.
    sent: bool = False
    tries: int = 0


class Surroundings(msgspec.Struct, frozen=True, eq=False):
    """What a run needs of the worker it is in."""

    alias: str
    is_stopping: Callable[[], bool]
    extend: Callable[[Claim, float], None]
    # None where nothing may be interrupted: in the thread of a test.
    limits: TimeLimits | None
    # Told of each claim whose handler is about to be entered.
    starts: Callable[[Claim], None]
    # Around each run: sets back what a job changed that belongs to the whole process.
    process: AbstractContextManager[None] = _NOTHING
    pid: int = msgspec.field(default_factory=os.getpid)


def not_to_run(claim: Claim, around: Surroundings, now: float) -> Outcome | None:
    """Return the outcome of a claim that must not be started, None for one that may.

    `now` is the process's monotonic clock.
    """
    if around.is_stopping() or now >= claim.lease_ends:
        # Nothing starts any more. Or the process was paused, or the job waited too long:
        # it may be another's now.
        return unstarted(claim)
    if claim.cancelled:
        return cancelled_unrun(claim)
    if claim.suspect and claim.attempt > claim.handler.attempts:
        if claim.last_end:
            # Its error is in the row already.
            return Outcome(claim, "fail_unrun", reason=ENDS[claim.last_end])
        attempts = claim.handler.attempts
        lost = WorkerLost(
            f"the worker was lost while it ran attempt {attempts} of {attempts}: "
            "look for a killed or crashed process, then retry the job"
        )
        error, trace = describe(lost)
        return Outcome(
            claim,
            "fail_unrun",
            error=error,
            traceback=trace,
            exception=path_of(lost),
            reason="lost",
        )
    return None


def see_off_in_time(outcome: Outcome, around: Surroundings) -> None:
    """See off a job, by this thread's connections: once the database answers.

    A worker that stops meanwhile leaves it to whoever claims it next.
    """
    while True:
        try:
            see_off(outcome, around.alias)
        except (OperationalError, InterfaceError):
            connections[around.alias].close_if_unusable_or_obsolete()
        except DatabaseError as error:
            queue.tell(logging.ERROR, outcome.claim, "is not cleaned up: %s", error)
            outcome.cleaned = False
            return
        else:
            return
        if around.is_stopping():
            outcome.verb = "none"
            return
        time.sleep(SEE_OFF_AGAIN_SECONDS)


def see_off_apart(outcome: Outcome, around: Surroundings) -> None:
    """See off a job, by connections that are opened for it."""
    own = HandlerConnections()
    try:
        see_off_in_time(outcome, around)
    finally:
        own.leave()


def see_off(outcome: Outcome, alias: str) -> None:
    """Call what the handler has for a job that fails for good: `explain` and `cleanup`.

    Before that is stored, while the claim lasts: what a crash in between leaves out, the
    next claim does.
    """
    claim = outcome.claim
    handler = claim.handler
    if outcome.error and not handler.sees_off:
        return
    row = Job.objects.using(alias).filter(pk=claim.job_id, worker=claim.token).first()
    if row is None:
        return
    outcome.error = outcome.error or row.error
    outcome.message = outcome.message or queue.explain(handler, row, _error_of(outcome))
    outcome.cleaned = queue.clean_up(handler, row)


def undo_apart(undo: Callable[[str, str], None], outcome: Outcome, alias: str) -> None:
    """Undo what a run has stored elsewhere, by connections that are opened for it."""
    own = HandlerConnections()
    try:
        undo(alias, outcome.result or "null")
    except Exception as error:
        queue.tell(logging.ERROR, outcome.claim, "what came too late is not undone", error=error)
    finally:
        own.leave()


def _error_of(outcome: Outcome) -> BaseException:
    if outcome.reason == "cancelled":
        return Cancelled()
    if outcome.raised is not None:
        return outcome.raised
    return JobTimeout() if outcome.reason == "timeout" else WorkerLost(outcome.error)


def cancelled_unrun(claim: Claim) -> Outcome:
    """Return the outcome of a claim whose job was cancelled before: it is not run again."""
    cancelled = path_of(Cancelled())
    return Outcome(claim, "fail_unrun", error="Cancelled", exception=cancelled, reason="cancelled")


def unstarted(claim: Claim) -> Outcome:
    """Return the outcome of a claim that was not started. A suspect stays one."""
    return Outcome(claim, "leave" if claim.suspect else "give_back")


def run(claim: Claim, around: Surroundings) -> Outcome:
    """Run a job whose handler is a plain function; never raises."""
    # The one place that catches everything: whatever a handler raises, sys.exit()
    # and KeyboardInterrupt included, is about its job and not about the worker.
    try:
        arguments = _arguments_of(claim, around)
        if isinstance(arguments, Outcome):
            return arguments
        around.starts(claim)
        if claim.handler.atomic:
            return _run_atomic(claim, arguments, around)
        # A fresh context: language, time zone and all context variables at their start.
        returned = Context().run(_call, claim, arguments, around)
        return Outcome(claim, "complete") if claim.handler.keep is None else _done(claim, returned)
    except BaseException as raised:
        return outcome_of(claim, raised)


def _done(claim: Claim, returned: object) -> Outcome:
    """Return the outcome of a handler that returned. Raises ResultInvalid."""
    if claim.handler.keep is None:
        return Outcome(claim, "complete")
    return Outcome(claim, "keep", result=encode_result(returned))


def _call(claim: Claim, arguments: tuple[Any, ...], around: Surroundings) -> object:
    """Call the handler, within its timeout: nothing but its own code is interrupted."""
    try:
        if claim.handler.timeout is None or around.limits is None:
            returned = claim.handler.function(*arguments)
        else:
            returned = around.limits.call(claim, arguments)
    finally:
        _end_a_fork(around)
    if returned is not None and inspect.iscoroutine(returned):
        returned.close()
        raise TypeError(
            f"{claim.handler.where} returned a coroutine, which nobody awaits: it is an async "
            "function behind a plain decorator; make the decorator's wrapper async, too"
        )
    return returned


def _end_a_fork(around: Surroundings) -> None:
    """End this process if a handler forked it, and came back in the copy, too.

    It would go on as this worker: with its claims, on the very same connections.
    """
    if os.getpid() != around.pid:
        os._exit(0)


async def run_async(claim: Claim, around: Surroundings) -> Outcome:
    """Run a job whose handler is async; never raises. Give it a context of its own."""
    limit: asyncio.Timeout | None = None
    try:
        arguments = _arguments_of(claim, around)
        if isinstance(arguments, Outcome):
            return arguments
        around.starts(claim)
        timeout = claim.handler.timeout
        watch = around.limits.watched(claim) if around.limits and timeout else _NOTHING
        with watch:
            async with asyncio.timeout(timeout) as limit:
                try:
                    with _stoppable(claim) if claim.handler.keep is not None else _NOTHING:
                        returned = await claim.handler.function(*arguments)
                finally:
                    _end_a_fork(around)
        if limit.expired():  # it has swallowed its cancellation
            raise JobTimeout
        return _done(claim, returned)
    except BaseException as raised:  # as in `run`
        if isinstance(raised, asyncio.CancelledError) and claim.cancelled:
            return outcome_of(claim, Cancelled())
        if isinstance(raised, TimeoutError) and limit is not None and limit.expired():
            return outcome_of(claim, JobTimeout())
        return outcome_of(claim, raised)


@contextmanager
def _stoppable(claim: Claim) -> Iterator[None]:
    """Let an async run of a kept job be cancelled, at its next await, if the job is."""
    task = asyncio.current_task()
    if task is None:
        yield
        return
    loop, is_running = task.get_loop(), True

    def cancel() -> None:
        if is_running:
            task.cancel()

    claim.stop = lambda: loop.call_soon_threadsafe(cancel)
    if claim.cancelled:
        claim.stop()
    try:
        yield
    except asyncio.CancelledError:
        if claim.cancelled:
            task.uncancel()  # the task goes on: it has the outcome to tell
        raise
    finally:
        is_running = False
        claim.stop = None


def _arguments_of(claim: Claim, around: Surroundings) -> tuple[Any, ...] | Outcome:
    """Return what the handler is called with, or the failure of a payload that does not fit."""
    try:
        request = claim.handler.codec.decode(claim.payload)
    except PayloadInvalid as misfit:
        # At once: no number of attempts mends a payload.
        error, trace = describe(misfit)
        path = path_of(misfit)
        return Outcome(claim, "fail", error=error, traceback=trace, exception=path, raised=misfit)
    if not claim.handler.takes_run:
        return (request,)
    if claim.handler.keep is not None:
        claim.notes = Notes()
        claim.notes.cancelled = claim.cancelled
    return request, Run(
        id=claim.job_id,
        topic=claim.handler.topic,
        key=claim.key,
        attempt=claim.attempt,
        max_attempts=claim.handler.attempts,
        created_at=moment_of(claim.created_at),
        uid=claim.uid,
        _is_stopping=around.is_stopping,
        _extend=lambda seconds: around.extend(claim, seconds),
        _is_cancelled=lambda: claim.cancelled,
        _alias=around.alias,
        _token=claim.token,
        _notes=claim.notes,
    )


def outcome_of(claim: Claim, raised: BaseException) -> Outcome:
    """Return what becomes of a job whose handler raised."""
    outcome = _outcome_of(claim, raised)
    if isinstance(raised, Cancelled) or claim.cancelled:
        end_as_cancelled(outcome)
    return outcome


def end_as_cancelled(outcome: Outcome) -> bool:
    """Make an outcome that leaves its job to be run again a failure: it was cancelled.

    Tells whether it has become one.
    """
    if outcome.verb in ("complete", "keep", "none"):
        return False  # it is done all the same
    was_final = outcome.verb in FINAL_FAILURES
    outcome.verb = outcome.verb if was_final else "fail"
    outcome.reason = "cancelled"
    outcome.error = outcome.error or "Cancelled"
    outcome.exception = outcome.exception or path_of(Cancelled())
    return not was_final


def _outcome_of(claim: Claim, raised: BaseException) -> Outcome:
    handler = claim.handler
    if isinstance(raised, Snooze):
        if raised.delay == 0:
            return Outcome(claim, "give_back")
        return Outcome(claim, "snooze", pause=raised.delay)
    pause = handler.pause_after(claim.attempt)
    blamed = raised
    if isinstance(raised, Retry):
        pause = pause if raised.delay is None else raised.delay
        blamed = raised.__cause__ or raised
    error, trace = describe(blamed)
    if isinstance(raised, JobTimeout):
        error = f"JobTimeout: it took longer than {handler.timeout:g} s"
    final = isinstance(raised, (GiveUp, ResultInvalid)) or claim.attempt >= handler.attempts
    return Outcome(
        claim,
        "fail" if final else "retry",
        pause=pause,
        error=error,
        traceback=trace,
        exception=path_of(blamed),
        reason=_reason_of(raised),
        message=storable(raised.reason, characters=2_000) if isinstance(raised, GiveUp) else "",
        raised=raised,
    )


def _reason_of(raised: BaseException) -> str:
    if isinstance(raised, GiveUp):
        return "refused"
    return "timeout" if isinstance(raised, JobTimeout) else "error"


def _run_atomic(claim: Claim, arguments: tuple[Any, ...], around: Surroundings) -> Outcome:
    """Run the handler in a transaction of the queue's database that ends with the job."""
    connection = connections[around.alias]
    committed = False

    def note_commit() -> None:
        nonlocal committed
        committed = True

    def in_context() -> None:
        with database_of(connection).atomic_job(connection):
            transaction.on_commit(note_commit, using=around.alias)
            outcome = _done(claim, _call(claim, arguments, around))
            if outcome.verb == "keep":
                queue.keep_joined(connection, claim, outcome.result)
            else:
                queue.complete_joined(connection, claim)
            told = queue.tell_outcomes(connection, [(claim.handler, claim.job_id)])
            queue.wake(connection, told)

    try:
        Context().run(in_context)
    except ClaimLost as lost:
        queue.tell(logging.WARNING, claim, "lost, its work is rolled back: %s", lost)
        return Outcome(claim, "none")
    except BaseException as raised:
        if not committed:
            raise
        # Its work and its end are stored; only an on_commit function failed.
        queue.tell(logging.ERROR, claim, "done, but an on_commit function raised", error=raised)
    return Outcome(claim, "none")
