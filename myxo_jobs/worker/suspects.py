"""Which suspects may run in one process, and beside which.

A suspect is a job whose last claim ended with its lease: its worker died, and perhaps
by its doing. Of several, one may be the killer and the others bystanders, who are
charged an attempt each time they die beside it. So suspects start one after the other,
each with a head start in which a killer mostly kills, longer with each attempt; and in
the later half of its attempts a suspect is the only one that its process runs.
"""

from __future__ import annotations

from myxo_jobs.queue import Claim

HEAD_START_SECONDS = 0.5
# A write that took so long has waited for somebody else's lock.
SLOW_SECONDS = 0.2
# A lease keeper whose writes were held up tries again within half of it.
HOLDERS_SECONDS = 0.4


class Writes:
    """Whether writes go through of late, so that the holders of claims could renew them.

    Somebody's lock, on the table or on SQLite's file, stops every renewal, and claims of
    living workers seem to be over. So a claim may pass for over only while a write of our
    own came through promptly, not long ago and not just now. Moments are of the monotonic
    clock; `shortest_lease` is seconds.
    """

    def __init__(self, shortest_lease: float) -> None:
        # A holder has always half of its lease left when a lock begins.
        self._fresh_seconds = shortest_lease * 0.45
        self._holders_seconds = min(HOLDERS_SECONDS, shortest_lease / 4)
        self._last = self._since = float("-inf")

    def add(self, began: float, ended: float) -> None:
        """Take note of a write of ours."""
        if ended - began > SLOW_SECONDS or began - self._last > self._fresh_seconds:
            self._since = ended
        self._last = ended

    def had_time(self, now: float) -> bool:
        """Tell whether living holders had the time to renew what they hold."""
        return now - self._last <= self._fresh_seconds and now >= self.had_time_at()

    def had_time_at(self) -> float:
        """Return when they have had it, if writes go on to go through."""
        return self._since + self._holders_seconds


class Suspects:
    """The suspects in hand of one worker. Moments are of the monotonic clock."""

    def __init__(self) -> None:
        # Each with whether it is in the later half of its attempts.
        self._in_hand: dict[Claim, bool] = {}
        # When the head start of the last one is over.
        self.next_at = 0.0
        self._one_waits = False

    def may_claim(self, now: float) -> bool:
        """Tell whether another suspect could be run now."""
        if self._one_waits:
            return not self._in_hand
        return now >= self.next_at and not any(self._in_hand.values())

    def admit(self, claim: Claim, now: float) -> bool:
        """Tell whether a claim may be run now; a suspect that may is taken in."""
        if not claim.suspect or claim.attempt > claim.handler.attempts:
            return True  # the latter is failed and not run
        is_late = claim.attempt > claim.handler.attempts / 2
        self._one_waits = is_late and bool(self._in_hand)
        if self._one_waits:
            return False
        self._in_hand[claim] = is_late
        self.next_at = now + HEAD_START_SECONDS * max(claim.attempt - 1, 1)
        return True

    def ended(self, claim: Claim, *, ran: bool) -> bool:
        """Let a claim go; tell whether it was a suspect. One that ran has not killed anybody."""
        was_in_hand = self._in_hand.pop(claim, None) is not None
        if was_in_hand and ran:
            self.next_at = 0.0
        return was_in_hand
