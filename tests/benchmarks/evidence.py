"""Which jobs ran, as their handlers saw it: by it a run with a lost job is told."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable


class Evidence:
    """What the handlers of one process saw, in the order in which they began."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.moments: list[tuple[int, float]] = []
        self.expected = -1
        self.all_seen = threading.Event()

    def note(self, number: int) -> None:
        """Note that a job's handler began."""
        self.numbers.append(number)
        if len(self.numbers) == self.expected:
            self.all_seen.set()

    def note_moment(self, number: int) -> None:
        """Note when a job's handler began, by the monotonic clock, which all processes share."""
        self.moments.append((number, time.monotonic()))
        self.note(number)


class Void(Exception):  # noqa: N818 - a fact about a run
    """What was measured means nothing: a job was lost or ran twice, or the set-up failed."""


def check_each_ran_once(numbers: Iterable[int], expected: Iterable[int]) -> None:
    """Raise Void unless exactly the expected jobs ran, each once."""
    ran, put = Counter(numbers), Counter(expected)
    if ran != put:
        lost, twice = (put - ran).total(), (ran - put).total()
        raise Void(f"{lost} jobs were lost, {twice} ran twice")
