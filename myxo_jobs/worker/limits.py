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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from myxo_jobs.errors import JobTimeout
from myxo_jobs.queue import Claim

_STRUCK = object()


class _Limit:
    """The limit of one run: its thread, and its end by the monotonic clock."""

    def __init__(self, claim: Claim, thread_id: int, deadline: float) -> None:
        self.claim = claim
        self.thread_id = thread_id
        self.deadline = deadline


class TimeLimits:
    """The runs of a worker that have a timeout, and the thread that interrupts them.

    `wear_out` is told of each claim that was interrupted. With `watchdog`, a run that
    lets no other thread have the interpreter ends its process `grace` seconds after its
    timeout: only C code can do that, and `faulthandler` has it.
    """

    def __init__(self, wear_out: Callable[[Claim], None], *, grace: float, watchdog: bool) -> None:
        self._wear_out = wear_out
        self._grace = grace
        self._watchdog = watchdog
        self._limits: dict[_Limit, None] = {}
        self._changed = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def limited(self, claim: Claim) -> Iterator[None]:
        """Raise JobTimeout in the calling thread when the block takes too long."""
        timeout = claim.handler.timeout or math.inf
        limit = _Limit(claim, threading.get_ident(), time.monotonic() + timeout)
        self._enter(limit)
        struck_already = False
        try:
            yield
        except JobTimeout:
            struck_already = True
            raise
        finally:
            # Who takes the limit out has the word: this thread, and nothing will strike,
            # or the other one, and then it strikes here at the latest, not in the next job.
            if self._limits.pop(limit, _STRUCK) is _STRUCK and not struck_already:
                for _ in range(1000):
                    time.sleep(0.001)

    def stop(self) -> None:
        self._stopped = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
        if self._watchdog:
            faulthandler.cancel_dump_traceback_later()

    def _enter(self, limit: _Limit) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="myxo_jobs timeouts", daemon=True
            )
            self._thread.start()
        self._limits[limit] = None
        self._changed.set()

    def _serve(self) -> None:
        while not self._stopped:
            self._changed.clear()
            limits = list(self._limits)
            next_deadline = min((limit.deadline for limit in limits), default=None)
            if next_deadline is None:
                self._arm_watchdog(None)
                self._changed.wait()
                continue
            wait = next_deadline - time.monotonic()
            if wait > 0:
                self._arm_watchdog(wait + self._grace)
                self._changed.wait(wait)
                continue
            for limit in limits:
                if limit.deadline <= time.monotonic():
                    self._strike(limit)

    def _strike(self, limit: _Limit) -> None:
        if self._limits.pop(limit, _STRUCK) is _STRUCK:
            return
        self._wear_out(limit.claim)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(limit.thread_id), ctypes.py_object(JobTimeout)
        )

    def _arm_watchdog(self, seconds: float | None) -> None:
        if not self._watchdog:
            return
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(seconds, 0.1), exit=True)


def rss_mib() -> float:
    """Return the resident memory of this process in MiB; its highest where /proc is missing."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource

        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest / (1024 * 1024 if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1024 * 1024)
