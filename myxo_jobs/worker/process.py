"""What all jobs of a process share, and what they leave in it."""

from __future__ import annotations

import locale
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import msgspec

from myxo_jobs.queue import Claim

logger = logging.getLogger("myxo_jobs")

LOOK_EVERY_SECONDS = 5.0
TELL_EVERY_SECONDS = 600.0
MOST_TOLD = 10
# The worker's own, and those of pools, which are kept on purpose: concurrent.futures'
# (asgiref's is one), asyncio's and psycopg's.
KEPT_THREADS = ("myxo_jobs", "ThreadPoolExecutor-", "asyncio_", "pool-")


class ProcessState:
    """The working directory, umask, locale and standard output of a process.

    A context manager around each run: the last one to leave sets back what jobs have
    changed. Not sooner, since a job beside it may use what it has changed itself.
    Signal handlers are safe: Python lets only the main thread set them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._locale = locale.setlocale(locale.LC_ALL)
        self._folder = _working_directory()

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self.set_back()

    def set_back(self) -> None:
        """Make the process as it was at the start."""
        os.umask(self._umask)
        if _working_directory() != self._folder and self._folder is not None:
            with suppress(OSError):  # it is gone
                os.chdir(self._folder)
        if locale.setlocale(locale.LC_ALL) != self._locale:
            locale.setlocale(locale.LC_ALL, self._locale)
        # Closing one leaves its descriptor open.
        if getattr(sys.stdout, "closed", False):
            sys.stdout = _open_again(sys.stdout, 1)
        if getattr(sys.stderr, "closed", False):
            sys.stderr = _open_again(sys.stderr, 2)


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - after each job: a Path takes longer than the call
    except OSError:  # it was removed
        return None


def _open_again(closed: TextIO, descriptor: int) -> TextIO:
    try:
        return open(
            descriptor,
            "w",
            buffering=1,
            encoding=closed.encoding,
            errors=closed.errors,
            closefd=False,
        )
    except OSError:  # the descriptor is closed, too
        return closed


class _Sight(msgspec.Struct, frozen=True):
    """A child process or thread: what it is, and what was in hand when it was first seen.

    `topics` are those of whoever may have started it.
    """

    what: str
    in_hand: set[Claim]
    topics: set[str]


class Leftovers:
    """Tells of child processes and threads that jobs have left behind.

    Something is left behind when none of the claims that were in hand when it was first
    seen is in hand any more: whoever started it has ended.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._looked_at = self._told_at = -math.inf
        self._sights: dict[str, _Sight] = {}
        self._told: set[str] = set()
        self._topics: set[str] = set()

    def note(self, topics: Iterable[str]) -> None:
        """Take note of topics whose jobs have ended."""
        self._topics.update(topics)

    def look(self, held: Callable[[], Iterable[Claim]]) -> None:
        """Look, once in a while, and tell of what is left behind, each once."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_SECONDS:
            return
        self._looked_at = now
        in_hand = set(held())
        topics = self._topics | {claim.handler.topic for claim in in_hand}
        self._topics = set()
        try:
            there = {**_children(), **_threads()}
        except OSError:  # no descriptor is left to look with
            return
        self._sights = {
            key: self._sights.get(key) or _Sight(what, in_hand, topics)
            for key, what in there.items()
        }
        self._told &= set(there.values())
        left = [
            sight
            for sight in self._sights.values()
            if sight.what not in self._told and not sight.in_hand & in_hand
        ]
        if left and now - self._told_at >= TELL_EVERY_SECONDS:
            self._told_at = now
            self._tell(left)

    def _tell(self, left: list[_Sight]) -> None:
        whats = sorted({sight.what for sight in left})
        self._told.update(whats)
        shown = ", ".join(whats[:MOST_TOLD])
        if len(whats) > MOST_TOLD:
            shown += f" and {len(whats) - MOST_TOLD} more"
        topics = ",".join(sorted(set().union(*(sight.topics for sight in left))))
        logger.warning("worker=%s topics=%s have left behind: %s", self._name, topics, shown)


def _children() -> dict[str, str]:
    """Return the child processes of this one by a key; none where Linux does not list them."""
    found = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            for pid in listed.read_text().split():
                with suppress(OSError):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found[f"process {pid}"] = f"process {pid} ({name})"
    return found


def _threads() -> dict[str, str]:
    """Return the threads of this process that are neither the worker's nor a pool's."""
    return {
        f"thread {thread.native_id}": f"thread {re.sub(r'[0-9]+', '…', thread.name)}"
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.name.startswith(KEPT_THREADS)
    }
