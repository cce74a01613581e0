"""What a worker process tells its supervisor, in memory that both share.

Only the worker writes, but for one flag. After its death the supervisor reads which jobs
it held, which of them it had started, and under which tokens, without asking the worker
or walking the table. A place is filled before it is marked, and marked before the job can start.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from myxo_jobs.queue import Claim

PLACES = 16_384
PREFIX_BYTES = 64

FREE, CLAIMED, CLAIMED_SUSPECT, STARTED, INTERRUPTED = 0, 1, 2, 3, 4
CLAIMING, HAS_STARTED, HAS_ENDED, SUSPECTS_FOLLOW = 0, 1, 2, 3


class Entry(msgspec.Struct, frozen=True):
    """One job that a worker process holds. Moments are of the shared monotonic clock."""

    job_id: int
    token: str
    started: bool
    interrupted: bool  # it ran into its timeout, and its handler has not left
    suspect: bool  # if it has not started
    attempt: int
    attempts: int  # how many there may be
    is_for_a_worker: bool  # its final failure
    pause: float  # before the next attempt, if this one fails
    lease: float
    lease_ends: float
    # When a run that has a timeout should long have ended; infinite without one.
    overdue_at: float

    @property
    def held(self) -> tuple[int, str]:
        return self.job_id, self.token

    @property
    def is_last_attempt(self) -> bool:
        return self.attempt >= self.attempts


class Board:
    """The shared memory of one worker process. Make it before the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PREFIX_BYTES + PLACES * (8 * 8 + 2) + 64)
        view = memoryview(self._memory)
        self._prefix = view[:PREFIX_BYTES]
        start = PREFIX_BYTES

        def column(kind: Any, size: int) -> Any:  # a memoryview of numbers
            nonlocal start
            part = view[start : start + size * PLACES]
            start += size * PLACES
            return part.cast(kind)

        self._ids = column("q", 8)
        self._numbers = column("q", 8)
        self._attempt = column("q", 8)
        self._attempts = column("q", 8)
        self._leases = column("d", 8)
        self._lease_ends = column("d", 8)
        self._pauses = column("d", 8)
        self._overdue_at = column("d", 8)
        self._states = column("B", 1)
        self._for_workers = column("B", 1)
        self._flags = view[start : start + 4]
        self._free: list[int] = list(range(PLACES - 1, -1, -1))
        self._places: dict[Claim, int] = {}

    # -- the worker's side ---------------------------------------------------

    def introduce(self, prefix: str) -> None:
        """Tell the prefix of all tokens of this worker."""
        encoded = prefix.encode()
        self._prefix[: len(encoded)] = encoded

    def claiming(self, is_claiming: bool) -> None:
        """Tell that a claim is under way: jobs may be held that are not on the board yet."""
        self._flags[CLAIMING] = int(is_claiming)

    @property
    def room(self) -> int:
        """How many more claims can be told of. No more may be made."""
        return len(self._free)

    def add(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            place = self._free.pop()
            self._places[claim] = place
            self._ids[place] = claim.job_id
            self._numbers[place] = int(claim.token.rpartition(".")[2])
            self._attempt[place] = claim.attempt
            self._attempts[place] = claim.handler.attempts
            self._for_workers[place] = claim.handler.failure_needs_a_worker
            self._pauses[place] = claim.handler.pause_after(claim.attempt)
            self._leases[place] = claim.handler.lease
            self._lease_ends[place] = claim.lease_ends
            self._overdue_at[place] = math.inf
            self._states[place] = CLAIMED_SUSPECT if claim.suspect else CLAIMED

    def start(self, claim: Claim, overdue_at: float) -> None:
        """Tell that a job's handler is about to be entered."""
        place = self._places.get(claim)
        if place is not None:
            self._overdue_at[place] = overdue_at
            self._states[place] = STARTED
            self._flags[HAS_STARTED] = 1

    def interrupt(self, claim: Claim) -> None:
        """Tell that a run is about to be interrupted by its timeout."""
        place = self._places.get(claim)
        if place is not None:
            self._states[place] = INTERRUPTED

    def renewed(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            place = self._places.get(claim)
            if place is not None:
                self._lease_ends[place] = claim.lease_ends

    def remove(self, claim: Claim) -> None:
        place = self._places.pop(claim, None)
        if place is not None:
            self._states[place] = FREE
            self._free.append(place)

    def end(self) -> None:
        """Tell that the worker has ended by itself: a handler's `os._exit` does not."""
        self._flags[HAS_ENDED] = 1

    def hears_of_suspects(self) -> bool:
        """Tell, once each time, whether the supervisor has ended claims of another worker."""
        told = bool(self._flags[SUSPECTS_FOLLOW])
        if told:
            self._flags[SUSPECTS_FOLLOW] = 0
        return told

    # -- the supervisor's side -----------------------------------------------

    def tell_of_suspects(self) -> None:
        """Let the worker ask for suspects soon, although it has asked lately."""
        self._flags[SUSPECTS_FOLLOW] = 1

    @property
    def prefix(self) -> str:
        return bytes(self._prefix).rstrip(b"\0").decode()

    @property
    def is_incomplete(self) -> bool:
        """Whether jobs may be held that are not on the board."""
        return bool(self._flags[CLAIMING])

    @property
    def has_started_a_job(self) -> bool:
        return bool(self._flags[HAS_STARTED])

    @property
    def has_ended(self) -> bool:
        return bool(self._flags[HAS_ENDED])

    def entries(self) -> Iterator[Entry]:
        """Return the jobs that are held."""
        prefix = self.prefix
        for match in re.finditer(rb"[^\0]", bytes(self._states)):
            place, state = match.start(), match.group()[0]
            yield Entry(
                job_id=self._ids[place],
                token=f"{prefix}.{self._numbers[place]}",
                started=state >= STARTED,
                interrupted=state == INTERRUPTED,
                suspect=state == CLAIMED_SUSPECT,
                attempt=self._attempt[place],
                attempts=self._attempts[place],
                is_for_a_worker=bool(self._for_workers[place]),
                pause=self._pauses[place],
                lease=self._leases[place],
                lease_ends=self._lease_ends[place],
                overdue_at=self._overdue_at[place],
            )
