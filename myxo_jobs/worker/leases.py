"""Keeping the claims of a worker: renewed in a thread and by a connection of their own.

Neither a busy handler, a blocked event loop nor a slow claim may delay a renewal,
and it goes on while the worker drains, until the last job has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from django.db import DatabaseError, InterfaceError, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs import queue
from myxo_jobs.databases import database_of
from myxo_jobs.queue import Claim
from myxo_jobs.worker.board import Board

LARGEST_BATCH = 1_000
# A claim is renewed when a third of its lease is over, so that two more tries fit in.
RENEW_BELOW = 2 / 3
TICKS_A_LEASE = 6
SHORTEST_TICK_SECONDS = 0.02
LONGEST_TICK_SECONDS = 1.0
# A pass that has not ended by then has been held up. No claim of ours can be over yet.
LATE_AFTER = RENEW_BELOW - 1 / 6
RETRY_SECONDS = 0.2
# How often the progress of runs is written at most.
PROGRESS_SECONDS = 0.5
# How often it is asked which jobs were cancelled. A job is asked about from the second time
# on that it is in hand, so that quick ones cost nothing.
CANCELLED_SECONDS = 0.8
# How long a handler waits for its extension to be stored; it is tried on after that.
EXTEND_WAIT_SECONDS = 2.0


class LeaseKeeper:
    """Holds the claims of one worker and renews them."""

    def __init__(self, alias: str, shortest_lease: float, board: Board | None = None) -> None:
        self._alias = alias
        self._board = board
        tick = shortest_lease / TICKS_A_LEASE
        self._tick = min(max(tick, SHORTEST_TICK_SECONDS), LONGEST_TICK_SECONDS)
        self._claims: set[Claim] = set()
        self._nudge = threading.Event()
        self._renewed = threading.Condition()
        # Whether a claim could not be renewed because somebody has its row locked.
        self._has_locked = False
        self._late_seconds = shortest_lease * LATE_AFTER
        self._passed_at = time.monotonic()
        self._stopped = False
        self._progress_at = 0.0
        self._cancelled_at = 0.0
        self._asked_about: set[Claim] = set()
        self._has_notes = False  # whether runs are in hand that may note their progress
        self._connection: BaseDatabaseWrapper | None = None
        self._thread = threading.Thread(target=self._serve, name="myxo_jobs leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hold(self, claims: Sequence[Claim]) -> None:
        if self._board is not None:
            self._board.add(claims)
        was_idle = not self._claims
        self._claims.update(claims)
        if was_idle and claims:
            self._nudge.set()  # from now on it has to look more often

    def release(self, claim: Claim) -> None:
        self._claims.discard(claim)
        if self._board is not None:
            self._board.remove(claim)

    def held(self) -> list[Claim]:
        return list(self._claims)

    def holds_all(self) -> bool:
        """Tell whether none of the claims may be over though their jobs run here."""
        is_late = time.monotonic() - self._passed_at > self._late_seconds
        return not self._claims or not (self._has_locked or is_late)

    def extend(self, claim: Claim, seconds: float) -> None:
        """Make a claim last at least so long from now; return once that is stored.

        At once where nobody may wait: in the event loop, and where the job's own
        transaction keeps every other connection from writing. It is stored soon after.
        """
        claim.extended_until = time.monotonic() + seconds
        self._nudge.set()
        handler = claim.handler
        if handler.is_async or (handler.atomic and not database_of(self._alias).can_write_beside):
            return
        with self._renewed:
            self._renewed.wait_for(
                lambda: claim.lease_ends >= claim.extended_until, EXTEND_WAIT_SECONDS
            )

    def stop(self) -> None:
        self._stopped = True
        self._nudge.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._stopped:
                pause = self._tick if self._claims else LONGEST_TICK_SECONDS
                try:
                    self._connect()
                    self._renew()
                    self._write_progress()
                    self._notice_cancelled()
                    if self._claims:
                        pause = min(pause, CANCELLED_SECONDS)
                    if self._has_notes:
                        pause = min(pause, PROGRESS_SECONDS)
                except (DatabaseError, InterfaceError):
                    # The loop meets the same outage and tells of it.
                    self._close()
                    pause = min(self._tick, RETRY_SECONDS)
                self._nudge.wait(pause)
                self._nudge.clear()
        finally:
            self._close()

    def _connect(self) -> BaseDatabaseWrapper:
        if self._connection is None:
            self._connection = database_of(self._alias).open(self._alias)
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close_quietly(connection)

    def _renew(self) -> None:
        now = time.monotonic()
        due = [
            claim
            for claim in self.held()
            if claim.lease_ends - now < claim.handler.lease * RENEW_BELOW
            or claim.extended_until > claim.lease_ends
        ]
        locked = 0
        for start in range(0, len(due), LARGEST_BATCH):
            batch = due[start : start + LARGEST_BATCH]
            renewed = queue.renew(self._connect(), batch)
            if self._board is not None:
                self._board.renewed(batch)
            with self._renewed:
                self._renewed.notify_all()
            locked += self._drop_lost([claim for claim in batch if claim.job_id not in renewed])
        self._has_locked = locked > 0
        self._passed_at = now

    def _write_progress(self) -> None:
        """Write what runs noted last; what cannot be written now is, the next time."""
        runs = [claim for claim in self.held() if claim.notes is not None]
        self._has_notes = bool(runs)
        now = time.monotonic()
        if not runs or now - self._progress_at < PROGRESS_SECONDS:
            return
        noted = [c for c in runs if c.notes is not None and c.notes.newest is not c.notes.stored]
        if not noted:
            return
        self._progress_at = now
        # A busy database is no reason to connect anew; a lost one stops the next renewal.
        with suppress(OperationalError):
            queue.note_progress(self._connect(), noted[:LARGEST_BATCH])

    def _notice_cancelled(self) -> None:
        now = time.monotonic()
        if now - self._cancelled_at < CANCELLED_SECONDS:
            return
        self._cancelled_at = now
        in_hand = set(self.held())
        long = in_hand & self._asked_about
        self._asked_about = in_hand
        if long:
            queue.notice_cancelled(self._connect(), long)

    def _drop_lost(self, claims: list[Claim]) -> int:
        """Renew no more what was claimed again or deleted; return how many are locked."""
        if not claims:
            return 0
        held = queue.still_held(self._connect(), claims)
        for claim in claims:
            if claim.job_id not in held:
                self.release(claim)
        return len(held)


def close_quietly(connection: BaseDatabaseWrapper) -> None:
    """Close a connection that may be broken."""
    try:
        connection.close()
    except (DatabaseError, InterfaceError):
        connection.connection = None
