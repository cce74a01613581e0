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
