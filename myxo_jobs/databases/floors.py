"""Where the passes over a topic's due jobs begin."""

from __future__ import annotations

from collections.abc import Sequence

# A priority and a moment, as the database writes it.
Floor = tuple[int, str]

# A full pass may take so much of the time, but is never rarer than that.
FULL_SHARE = 0.1
FULL_EVERY_SECONDS = 2.0


class Floors:
    """For each priority of a topic the earliest `due` that the last pass saw.

    Deleted jobs stay in the claim index for as long as any transaction could still see
    them, and a pass from the beginning walks past them all, and past the jobs in hand. So
    most passes begin where the one before found its first job. Others can come to stand
    before that: by a late commit, by a lease that ended, with a new priority. A full pass
    finds them. Moments are of the monotonic clock.
    """

    def __init__(self) -> None:
        self._floors: dict[int, str] = {}
        #: When the next full pass is due.
        self.full_at = 0.0
        #: Whether the last pass was none, so that it may have passed by due jobs.
        self.in_doubt = False

    def at(self, now: float) -> list[Floor] | None:
        """Return where to begin, the highest priority first; None for a full pass."""
        if now >= self.full_at or not self._floors:
            return None
        return sorted(self._floors.items(), reverse=True)

    def forget(self) -> None:
        """Let the next pass be a full one."""
        self.full_at = 0.0

    def passed(
        self, start: Sequence[Floor] | None, found: Sequence[Floor], *, began: float, ended: float
    ) -> None:
        """Take note of a pass: where it began, and the first job it saw of each priority."""
        self._floors.update(found)
        self.in_doubt = start is not None
        if start is None:
            self.full_at = ended + min((ended - began) / FULL_SHARE, FULL_EVERY_SECONDS)
