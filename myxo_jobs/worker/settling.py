"""Storing what became of the jobs that ran, many at a time."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from django.db import DatabaseError, InterfaceError, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs import queue
from myxo_jobs.databases import database_of
from myxo_jobs.queue import Claim
from myxo_jobs.worker.running import Outcome, Verb, end_as_cancelled

Store = Callable[[BaseDatabaseWrapper, Sequence[Outcome]], set[int]]

LARGEST_BATCH = 2_000
# A row that somebody has locked is tried again after so long.
LOCKED_RETRY_SECONDS = 0.1
# An outcome that the database refuses for its own sake is given up after so many
# tries: its lease then ends, and the job runs again.
TRIES = 5


def _complete(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    done = queue.complete(connection, [outcome.claim for outcome in outcomes])
    rest = [outcome.claim for outcome in outcomes if outcome.claim.job_id not in done]
    return done | queue.restart(connection, rest) if rest else done


def _keep(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    return queue.keep(connection, [(outcome.claim, outcome.result) for outcome in outcomes])


def _retry(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    failures = [_failure(outcome) for outcome in outcomes]
    return queue.retry(connection, failures, unless_cancelled=True)


def _fail(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    return queue.fail(connection, [_failure(outcome) for outcome in outcomes])


def _fail_unrun(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    return queue.fail_unrun(connection, [_failure(outcome) for outcome in outcomes])


def _failure(outcome: Outcome) -> queue.Failure:
    return queue.Failure(
        outcome.claim,
        outcome.error,
        outcome.traceback,
        outcome.exception,
        outcome.reason,
        outcome.message,
        outcome.pause,
        outcome.cleaned,
    )


def _telling(store: Store) -> Store:
    """Call the handlers' `at_outcome`, if there is one, in the transaction that stores."""

    def store_and_tell(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
        if not any(outcome.claim.handler.at_outcome for outcome in outcomes):
            return store(connection, outcomes)
        with database_of(connection).one_transaction(connection):
            stored = store(connection, outcomes)
            claims = [outcome.claim for outcome in outcomes]
            ended = [(one.handler, one.job_id) for one in claims if one.job_id in stored]
            topics = queue.tell_outcomes(connection, ended)
        queue.wake(connection, topics)
        return stored

    return store_and_tell


def _snooze(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    return queue.snooze(connection, [(o.claim, o.pause) for o in outcomes])


def _give_back(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    claims = [outcome.claim for outcome in outcomes]
    return queue.give_back(connection, claims, unless_cancelled=True)


def _leave(connection: BaseDatabaseWrapper, outcomes: Sequence[Outcome]) -> set[int]:
    return queue.leave(connection, [outcome.claim for outcome in outcomes])


STORES: dict[Verb, Store] = {
    "complete": _complete,
    "keep": _telling(_keep),
    "retry": _retry,
    "fail": _telling(_fail),
    "fail_unrun": _telling(_fail_unrun),
    "snooze": _snooze,
    "give_back": _give_back,
    "leave": _leave,
}


class Settling:
    """Outcomes until they are stored, or their claim is lost.

    `release` is told of each claim that needs no renewal any more; `see_off` gets each
    outcome that became a final failure here, and it comes back by `add`; `drop` gets each
    that came too late.
    """

    def __init__(
        self,
        release: Callable[[Claim], None],
        see_off: Callable[[Outcome], None],
        drop: Callable[[Outcome], None],
    ) -> None:
        self._release = release
        self._see_off = see_off
        self._drop = drop
        self._leaving: set[Outcome] = set()
        self._outcomes: list[Outcome] = []
        self._locked: list[Outcome] = []
        self._locked_until = 0.0
        self._batch = LARGEST_BATCH

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._leaving.discard(outcome)
            if outcome.verb == "none":
                self._release(outcome.claim)
            else:
                self._outcomes.append(outcome)

    def claims(self) -> set[Claim]:
        """Return the claims whose outcomes are not stored yet."""
        return {outcome.claim for outcome in (*self._outcomes, *self._locked, *self._leaving)}

    def is_empty(self) -> bool:
        return not self._outcomes and not self._locked and not self._leaving

    def wait(self) -> float | None:
        """Return in how many seconds there is something to store, None if there is nothing."""
        if self._outcomes:
            return 0.0
        if self._locked:
            return max(self._locked_until - time.monotonic(), 0.0)
        return None

    def store(self, connection: BaseDatabaseWrapper) -> None:
        """Store what there is. Raises DatabaseError when the database does not do it now;
        what was not stored is kept for the next call.
        """
        if self._locked and time.monotonic() >= self._locked_until:
            self._outcomes += self._locked
            self._locked = []
        by_verb: defaultdict[Verb, list[Outcome]] = defaultdict(list)
        for outcome in self._outcomes:
            if not outcome.claim.cancelled or not self._leaves(outcome):
                by_verb[outcome.verb].append(outcome)
        self._outcomes = []
        batches = [
            outcomes[start : start + self._batch]
            for outcomes in by_verb.values()
            for start in range(0, len(outcomes), self._batch)
        ]
        while batches:
            try:
                self._store_batch(connection, batches[0])
            except (DatabaseError, InterfaceError):
                self._outcomes = [outcome for batch in batches for outcome in batch]
                raise
            del batches[0]

    def _leaves(self, outcome: Outcome) -> bool:
        """End a cancelled job; tell whether it has to be seen off before that is stored."""
        if not end_as_cancelled(outcome) or not outcome.claim.handler.sees_off:
            return False
        self._leaving.add(outcome)
        self._see_off(outcome)
        return True

    def _store_batch(self, connection: BaseDatabaseWrapper, outcomes: list[Outcome]) -> None:
        store = STORES[outcomes[0].verb]
        try:
            stored = store(connection, outcomes)
        except (OperationalError, InterfaceError):
            # The answer may have been lost after the commit: then the rows are changed
            # already, and that is no lost claim. Smaller batches meet fewer timeouts.
            for outcome in outcomes:
                outcome.sent = True
            self._batch = max(self._batch // 2, 1)
            raise
        except DatabaseError:
            # One row's fault must not hold up the others.
            for outcome in outcomes:
                self._store_alone(connection, outcome)
            return
        self._batch = min(self._batch * 2, LARGEST_BATCH)
        self._note(connection, outcomes, stored)

    def _store_alone(self, connection: BaseDatabaseWrapper, outcome: Outcome) -> None:
        try:
            stored = STORES[outcome.verb](connection, [outcome])
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError as error:
            outcome.tries += 1
            if outcome.tries >= TRIES:
                words = "outcome refused by the database, runs again when its lease ends"
                queue.tell(logging.ERROR, outcome.claim, words, error=error)
                self._release(outcome.claim)
            else:
                self._keep_for_later(outcome)
            return
        self._note(connection, [outcome], stored)

    def _note(
        self, connection: BaseDatabaseWrapper, outcomes: list[Outcome], stored: set[int]
    ) -> None:
        rest = []
        for outcome in outcomes:
            if outcome.claim.job_id in stored:
                self._release(outcome.claim)
                tell_of(outcome)
            else:
                rest.append(outcome)
        if not rest:
            return
        held = queue.still_held(connection, [outcome.claim for outcome in rest])
        queue.notice_cancelled(connection, [o.claim for o in rest if o.claim.job_id in held])
        for outcome in rest:
            if outcome.claim.job_id in held:
                self._keep_for_later(outcome)
                continue
            self._release(outcome.claim)
            self._drop(outcome)
            if not outcome.sent:
                words = "lost its claim to another or was deleted: outcome dropped, %s"
                queue.tell(logging.WARNING, outcome.claim, words, outcome.verb)

    def _keep_for_later(self, outcome: Outcome) -> None:
        self._locked.append(outcome)
        self._locked_until = time.monotonic() + LOCKED_RETRY_SECONDS


def tell_of(outcome: Outcome) -> None:
    """Log a stored outcome."""
    claim, verb = outcome.claim, outcome.verb
    if verb in ("complete", "keep"):
        if queue.logger.isEnabledFor(logging.DEBUG):
            queue.tell(logging.DEBUG, claim, "done")
    elif verb == "retry":
        name = _first_line(outcome.error).partition(":")[0]
        words = "failed error=%s next_in=%.1fs"
        queue.tell(logging.WARNING, claim, words, name, outcome.pause)
    elif verb == "snooze":
        queue.tell(logging.INFO, claim, "snoozed next_in=%.1fs", outcome.pause)
    elif verb in ("give_back", "leave"):
        queue.tell(logging.WARNING, claim, "given back")
    elif outcome.reason == "cancelled":  # as somebody wanted: the row has the traceback
        queue.tell(logging.INFO, claim, "cancelled error=%s", _first_line(outcome.error))
    else:
        words = "failed for good error=%s"
        first_line = _first_line(outcome.error)
        queue.tell(logging.ERROR, claim, words, first_line, error=outcome.raised)
    outcome.raised = None


def _first_line(text: str) -> str:
    """Return what of a text stands in a log line: nothing that looks like another one."""
    return next(iter(text.splitlines()), "")[:200]
