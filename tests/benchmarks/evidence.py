"""Which jobs ran, as their handlers saw it: by it a run with a lost job is told."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

#: Names the file of those handlers whose processes end without telling.
RAN_FILE = "MYXO_BENCHMARK_RAN"
RAN = struct.Struct("<qd")


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


_files: dict[int, int] = {}


def write_down(number: int) -> None:
    """Add a job whose handler began, and the moment, to the file: with one write."""
    pid = os.getpid()  # a forked worker opens its own
    if pid not in _files:
        _files[pid] = os.open(os.environ[RAN_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(_files[pid], RAN.pack(number, time.monotonic()))


def written_down(path: Path) -> list[tuple[int, float]]:
    """Return the jobs of a file and when their handlers began."""
    return list(RAN.iter_unpack(path.read_bytes()))


def wait_for_jobs(path: Path, count: int, *, within: float) -> None:
    """Wait until so many jobs are written down; raise Void when they are not in time."""
    deadline = time.monotonic() + within
    while not path.exists() or path.stat().st_size < count * RAN.size:
        if time.monotonic() > deadline:
            done = path.stat().st_size // RAN.size if path.exists() else 0
            raise Void(f"only {done} of {count} jobs ran within {within:g} s")
        time.sleep(0.02)


class Void(Exception):  # noqa: N818 - a fact about a run
    """What was measured means nothing: a job was lost or ran twice, or the set-up failed."""


def check_each_ran_once(numbers: Iterable[int], expected: Iterable[int]) -> None:
    """Raise Void unless exactly the expected jobs ran, each once."""
    ran, put = Counter(numbers), Counter(expected)
    if ran != put:
        lost, twice = (put - ran).total(), (ran - put).total()
        raise Void(f"{lost} jobs were lost, {twice} ran twice")
