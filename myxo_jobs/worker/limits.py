"""How long a run may take, `timeout` for plain handlers; and how much memory is used.

Python has one way to end a function in another thread: raise an exception at its next
instruction (PyThreadState_SetAsyncExc, https://docs.python.org/3/c-api/threads.html).
It may strike inside any `with` or `finally` and leave a lock held for ever, so a process
in which that was done takes nothing more: see `Worker.wear_out`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from myxo_jobs.errors import JobTimeout
from myxo_jobs.queue import Claim

_STRUCK = object()
# How long an async run gets to leave once it was cancelled, before its process wears out.
CANCEL_SECONDS = 1.0
# How long after the grace a process in which a run was interrupted may take to end.
LEAVE_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 3600.0


class _Limit:
    """The limit of one run: its thread, None if it is async, and its end.

    The end is a moment of the monotonic clock.
    """

    def __init__(self, claim: Claim, thread_id: int | None, deadline: float) -> None:
        self.claim = claim
        self.thread_id = thread_id
        self.deadline = deadline
        self.struck = False


class TimeLimits:
    """The runs of a worker that have a timeout, and the thread that interrupts them.

    `wear_out` is told of each claim that is about to be interrupted, and `tell` of each
    that was. With `watchdog`, a run that lets no other thread have the interpreter ends
    its process `grace` seconds after its timeout, and so does a lock that an interrupted
    one has left held: only C code can do that, and `faulthandler` has it.
    """

    def __init__(
        self,
        wear_out: Callable[[Claim], None],
        tell: Callable[[Claim], None],
        *,
        grace: float,
        watchdog: bool,
    ) -> None:
        self._wear_out = wear_out
        self._tell = tell
        self._grace = grace
        self._watchdog = watchdog and _has_descriptor(sys.stderr)
        self._limits: dict[_Limit, None] = {}
        # Written in C: what interrupts a run that has just begun cannot leave it locked.
        self._changes: SimpleQueue[None] = SimpleQueue()
        self._stopped = False
        self._has_struck = False
        self._watchdog_at = math.inf
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def call(self, claim: Claim, arguments: Iterable[Any]) -> object:
        """Call a plain handler; return what it returns.

        Raises JobTimeout in it when it takes too long, and after it where it has swallowed
        that: the run is a failed attempt.
        """
        limit = _Limit(claim, threading.get_ident(), _deadline(claim))
        struck_already = False
        try:
            self._enter(limit)
            return claim.handler.function(*arguments)
        except JobTimeout:
            struck_already = True
            raise
        finally:
            # Who takes the limit out has the word: this thread, and nothing will strike,
            # or the other one, and then it strikes here at the latest, not in the next job.
            if self._limits.pop(limit, _STRUCK) is _STRUCK and not struck_already:
                while not limit.struck:
                    time.sleep(0.001)
                time.sleep(0.001)
                raise JobTimeout

    @contextmanager
    def watched(self, claim: Claim) -> Iterator[None]:
        """Wear the process out when an async run has not left soon after its timeout.

        It blocks the event loop, or goes on although it was cancelled.
        """
        limit = _Limit(claim, None, _deadline(claim) + CANCEL_SECONDS)
        self._enter(limit)
        try:
            yield
        finally:
            self._limits.pop(limit, None)

    def stop(self) -> None:
        self._stopped = True
        self._changes.put(None)
        if self._thread is not None:
            # Not for ever: an interrupted handler may have left a lock held.
            self._thread.join(1.0)
        if self._watchdog and not self._has_struck:
            faulthandler.cancel_dump_traceback_later()

    def _enter(self, limit: _Limit) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._serve, name="myxo_jobs timeouts", daemon=True
                )
                thread.start()
                self._thread = thread
        self._limits[limit] = None
        self._changes.put(None)
        if limit.deadline + self._grace < self._watchdog_at:
            # Here, since the run may give the other thread no moment to do it.
            self._set_watchdog(limit.deadline + self._grace)

    def _serve(self) -> None:
        while not self._stopped:
            limits = list(self._limits)
            next_deadline = min((limit.deadline for limit in limits), default=None)
            wait = None if next_deadline is None else next_deadline - time.monotonic()
            if wait is None or wait > 0:
                self._set_watchdog(
                    math.inf if next_deadline is None else next_deadline + self._grace
                )
                # Before the limits are read: what comes now is seen.
                self._wait(None if wait is None else min(wait, LONGEST_WAIT_SECONDS))
                continue
            for limit in limits:
                if limit.deadline <= time.monotonic():
                    self._strike(limit)

    def _wait(self, seconds: float | None) -> None:
        """Wait for a change."""
        with suppress(Empty):
            self._changes.get(timeout=seconds)
            while True:
                self._changes.get_nowait()

    def _strike(self, limit: _Limit) -> None:
        if self._limits.pop(limit, _STRUCK) is _STRUCK:
            return
        self._wear_out(limit.claim)
        if limit.thread_id is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(limit.thread_id), ctypes.py_object(JobTimeout)
            )
        limit.struck = True
        self._set_watchdog(time.monotonic() + self._grace + LEAVE_SECONDS)
        self._has_struck = True
        # Last, since a log can be slow, and its lock held by the one that was interrupted.
        self._tell(limit.claim)

    def _set_watchdog(self, at: float) -> None:
        """Let the process end at a moment of the monotonic clock; infinite: let it live.

        Once a handler was interrupted the process has to end, and nothing moves that.
        """
        if not self._watchdog or self._has_struck or at == self._watchdog_at:
            return
        self._watchdog_at = at
        if at == math.inf:
            faulthandler.cancel_dump_traceback_later()
        else:
            seconds = min(max(at - time.monotonic(), 0.1), threading.TIMEOUT_MAX)
            faulthandler.dump_traceback_later(seconds, exit=True)


def _has_descriptor(stream: Any) -> bool:
    """Tell whether a stream is a file, as `faulthandler` wants one."""
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


def _deadline(claim: Claim) -> float:
    return time.monotonic() + (claim.handler.timeout or math.inf)


def rss_mib() -> float:
    """Return the resident memory of this process in MiB; its highest where /proc is missing."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource

        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest / (1024 * 1024 if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1024 * 1024)
