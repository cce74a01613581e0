"""One topic in one worker: how many of its jobs to claim, and when."""

from __future__ import annotations

import time
from collections import deque

from myxo_jobs.databases import Floors
from myxo_jobs.handlers import Handler
from myxo_jobs.queue import Claim
from myxo_jobs.worker.running import Outcome
from myxo_jobs.worker.slots import Slots

# As many jobs are claimed ahead as can start within this time, by what the topic's
# jobs took lately; none ahead until that is known.
AHEAD_SECONDS = 0.2
MOST_AHEAD = 2_000
# A claimed job that has not started is given back before it has waited for a second.
UNSTARTED_SECONDS = 0.8
# How often a topic that always has jobs ahead makes room for a suspect.
ASK_FOR_SUSPECTS_SECONDS = 1.0
# A topic for which the system has no thread claims nothing for so long.
NO_THREAD_SECONDS = 2.0
# How much the newest jobs weigh in the mean run time.
NEWEST_WEIGHT = 0.3


class Lane:
    """The slots of a topic and the claims in hand: waiting for one, or running."""

    def __init__(self, handler: Handler, slots: Slots) -> None:
        self.handler = handler
        self.size = handler.workers
        self.slots = slots
        # Whether a claim may find something: set by looks, by ends and by claims that found
        # some, unset when one comes back empty.
        self.hopeful = True
        # Whether a wake-up came since the last claim. It tells of fresh jobs: without
        # another hope a claim looks for no others.
        self.woken = False
        self.floors = Floors()
        # Moments of the monotonic clock: it takes no suspects before this one, asked for
        # some at this one, and claims nothing before this one.
        self.suspects_after = 0.0
        self.suspects_asked_at = 0.0
        self.claims_after = 0.0
        # Until when suspects have to wait whose workers may live; so asked for none.
        self.stopped_until = 0.0
        # Whether it found one when it last asked for some: others may follow.
        self.found_suspect = False
        self.in_hand = 0
        # When few enough wait that the next claim should be under way.
        self.low = 0
        self._mean_seconds: float | None = None
        self._taken = 0
        # (how many claims were taken up to then, when) of claims that may be unstarted.
        self._batches: deque[tuple[int, float]] = deque()

    def room(self, now: float, *, suspects: bool) -> int:
        """Return how many jobs to claim now; 0 while enough are waiting.

        A suspect is claimed only into a free slot, and a topic with jobs ahead has none.
        So now and then none is claimed ahead, if `suspects` may be taken at all.
        """
        if now < self.claims_after or self.is_paused:
            return 0
        is_time_to_ask = suspects and now - self.suspects_asked_at > ASK_FOR_SUSPECTS_SECONDS
        ahead = 0 if is_time_to_ask else self._ahead()
        self.low = ahead // 2
        if self.in_hand >= self.size and self.slots.waiting() > self.low:
            return 0
        return max(self.size + ahead - self.in_hand, 0)

    @property
    def may_find(self) -> bool:
        """Whether a claim may find something."""
        return self.hopeful or self.woken

    @property
    def is_paused(self) -> bool:
        return self.handler.limit == 0

    def turn(self, handler: Handler, size: int) -> None:
        """Go on with the handler as its dials stand now, and so many slots."""
        self.handler = handler
        self.size = size
        self.slots.resize(size)
        self.hopeful = True

    def has_free_slot(self) -> bool:
        return self.in_hand < self.size

    def take(self, claims: list[Claim]) -> None:
        self.in_hand += len(claims)
        self._taken += len(claims)
        self._batches.append((self._taken, time.monotonic()))
        if not self.slots.add(claims, self.in_hand):
            self.claims_after = time.monotonic() + NO_THREAD_SECONDS

    def learn(self, outcomes: list[Outcome]) -> None:
        """Take note of runs that ended: their slots are free."""
        self.in_hand -= len(outcomes)
        runs = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
        if not runs:
            return
        newest = sum(runs) / len(runs)
        mean = self._mean_seconds
        weight = 1.0 if mean is None else NEWEST_WEIGHT
        self._mean_seconds = weight * newest + (1 - weight) * (mean or 0.0)

    def oldest_unstarted(self) -> float | None:
        """Return when the claim was made that waits longest for a slot, None if none waits."""
        waiting = self.slots.waiting()
        if not waiting:
            self._batches.clear()
            return None
        started = self._taken - waiting
        while self._batches and self._batches[0][0] <= started:
            self._batches.popleft()
        return self._batches[0][1] if self._batches else time.monotonic()

    def take_back_late(self) -> list[Claim]:
        """Return the claims that have waited too long for a slot, and learn from it."""
        oldest = self.oldest_unstarted()
        if oldest is None or time.monotonic() - oldest < UNSTARTED_SECONDS:
            return []
        self._mean_seconds = None
        return self.take_back()

    def take_back(self) -> list[Claim]:
        claims = self.slots.take_back()
        self.in_hand -= len(claims)
        self._taken -= len(claims)
        return claims

    def _ahead(self) -> int:
        # A job with one attempt that is charged unstarted would be failed unrun; and under a
        # limit a claim that waits here would keep another worker from running one.
        if (
            self._mean_seconds is None
            or self.handler.attempts == 1
            or self.handler.limit is not None
        ):
            return 0
        return min(int(self.size * AHEAD_SECONDS / max(self._mean_seconds, 1e-6)), MOST_AHEAD)
