"""`runjobs --processes N`: worker processes, and the one that looks after them.

One thread. It forks the workers, learns of a death at once, gives back what the dead one
held and replaces it; it renews the claims of a worker that cannot do so itself, because
C code keeps its interpreter, and ends one whose job is long past its timeout. All its
connections are closed before each fork: two processes on one socket would garble it.

Each worker holds the reading end of a pipe whose only writing end is here: the pipe's
end, whether by intention or by death, tells it to drain.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec
from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs import queue
from myxo_jobs.databases import database_of
from myxo_jobs.worker.board import Board, Entry
from myxo_jobs.worker.leases import close_quietly
from myxo_jobs.worker.worker import Worker

logger = logging.getLogger("myxo_jobs")

# The terminal is gone, on systems that have such a signal.
HANG_UP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *HANG_UP)
# A worker that ended to be replaced by a fresh process.
EXIT_WORN = 75
EXIT_FAULT = 70
TICK_SECONDS = 0.25
# A worker renews when a third of a lease is over; it is late when two thirds are.
LATE_BELOW = 1 / 3
FORK_RETRY_SECONDS = 10.0
KILLS_EVERY_SECONDS = 10.0
# How long workers get, after the grace, to end by themselves.
LEAVE_SECONDS = 2.0
ALARM_SECONDS = 0.5
# A worker that dies so often in a row before it has started a job is replaced after
# growing pauses.
EARLY_DEATHS = 3
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class _Child:
    """One worker process."""

    def __init__(self, pid: int, place: int, board: Board) -> None:
        self.pid = pid
        self.place = place
        self.board = board
        self.overdue: set[int] = set()
        # Stopped by a signal: its jobs are not renewed for it, so that others can go on.
        self.is_paused = False
        # Killed here, because it had not ended by the end of the grace.
        self.was_ended = False
        # Ends of leases that were renewed here, by job id.
        self.renewed: dict[int, float] = {}


class _Death(msgspec.Struct, frozen=True):
    """A worker process that ended, until what it held is given back."""

    child: _Child
    cause: str


class _Unlisted(msgspec.Struct, frozen=True):
    """A claim that a dead worker had no time to tell of."""

    held: tuple[int, str]


class Supervisor:
    """Runs `count` workers, made by `make_worker` in their own processes, until told to stop."""

    def __init__(
        self,
        count: int,
        make_worker: Callable[[Board], Worker],
        *,
        alias: str,
        grace: float,
        drain: bool,
    ) -> None:
        self._count = count
        self._make_worker = make_worker
        self._alias = alias
        self._grace = grace
        self._drain = drain
        self._children: dict[int, _Child] = {}
        # (place, when to fork) of workers to come.
        self._to_fork: list[tuple[int, float]] = [(place, 0.0) for place in range(count)]
        self._early_deaths = [0] * count
        self._deaths: list[_Death] = []
        self._retry_at = 0.0
        self._stop_signals = 0
        self._stopped_at: float | None = None
        self._connection: BaseDatabaseWrapper | None = None
        self._pipe_read, self._pipe_write = os.pipe()
        # How often the kernel had killed: lately, and at least a while before.
        self._kills_lately = self._kills_before = _out_of_memory_kills()
        self._kills_read_at = time.monotonic()

    def run(self) -> int:
        """Look after the workers until the last one has ended; return the exit status."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        listen_to_stop_signals(self._on_stop_signal)
        try:
            return self._look_after_all(wake_read)
        finally:
            # An interpreter that ends has no handler for it, and would be killed.
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _look_after_all(self, wake_read: int) -> int:
        while True:
            self._stop_if_told()
            self._reap()
            self._fork_due()
            self._count_kills()
            self._end_overdue()
            self._attend()
            if not self._children and not self._to_fork and not self._deaths:
                return 0
            if self._stopped_at is not None and not self._children and self._is_past_leaving():
                return 0  # the database is away: what was held runs again after its lease
            select.select([wake_read], [], [], self._pause())
            _drain_pipe(wake_read)

    # -- stopping ------------------------------------------------------------

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop_signals and number in HANG_UP:
            return  # a terminal and its shell both tell of one end
        self._stop_signals += 1
        if self._stop_signals > 1:
            self._leave(128 + number)
        # Its own statements may meet a locked table and wait far beyond the grace: the
        # workers hear of the stop here, too, and an alarm ends what has not ended by then.
        for child in self._children.values():
            _kill(child.pid, signal.SIGTERM)
        signal.signal(signal.SIGALRM, lambda *_: self._leave(0))
        signal.setitimer(signal.ITIMER_REAL, self._grace + LEAVE_SECONDS + ALARM_SECONDS)

    def _leave(self, status: int) -> None:
        """End all at once; what was held runs again after its lease."""
        for child in self._children.values():
            _kill(child.pid, signal.SIGKILL)
        os._exit(status)

    def _stop_if_told(self) -> None:
        if self._stop_signals and self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._to_fork = []
            os.close(self._pipe_write)
        if self._stopped_at is not None and self._is_past_leaving():
            for child in self._children.values():
                child.was_ended = True
                _kill(child.pid, signal.SIGKILL)

    def _is_past_leaving(self) -> bool:
        return (
            self._stopped_at is not None
            and time.monotonic() > self._stopped_at + self._grace + LEAVE_SECONDS
        )

    def _pause(self) -> float:
        now = time.monotonic()
        moments = [now + TICK_SECONDS, *(at for _, at in self._to_fork)]
        if self._deaths:
            moments.append(self._retry_at)
        return max(min(moments) - now, 0.0)

    # -- birth ---------------------------------------------------------------

    def _fork_due(self) -> None:
        now = time.monotonic()
        due = [place for place, at in self._to_fork if at <= now]
        self._to_fork = [(place, at) for place, at in self._to_fork if at > now]
        for place in due:
            self._fork(place)

    def _fork(self, place: int) -> None:
        self._close()
        _close_all_connections()
        _flush()
        # A signal that the new process gets before it has its own handlers waits for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            board = Board()
            pid = os.fork()
            if pid == 0:
                self._be_a_worker(board)
        except OSError as error:
            logger.warning("cannot start a worker process, tries on: %s", error)
            self._to_fork.append((place, time.monotonic() + FORK_RETRY_SECONDS))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._children[pid] = _Child(pid, place, board)

    def _be_a_worker(self, board: Board) -> None:
        """Run a worker in this forked process; never returns."""
        status = EXIT_FAULT
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._pipe_write)
            worker = self._make_worker(board)
            # A terminal and a service manager signal the workers, too.
            listen_to_stop_signals(lambda *_: worker.request_stop())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            threading.Thread(
                target=_drain_at_end,
                args=(self._pipe_read, worker),
                name="myxo_jobs pipe",
                daemon=True,
            ).start()
            worker.start()
            while not worker.join(0.5):
                pass
            board.end()
            status = EXIT_WORN if worker.worn and not worker.was_stopped else 0
        except BaseException:
            logger.exception("a worker process ended by a fault")
        finally:
            _flush()
            os._exit(status)

    # -- death ---------------------------------------------------------------

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.get(pid)
            if child is None:
                continue  # a process that a handler left behind
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                child.is_paused = os.WIFSTOPPED(status)
                continue
            del self._children[pid]
            self._bury(child, os.waitstatus_to_exitcode(status))

    def _bury(self, child: _Child, code: int) -> None:
        cause = self._cause(child, code)
        has_ended = child.board.has_ended
        if not has_ended:
            logger.warning("worker=%s pid=%d %s", child.board.prefix, child.pid, cause)
        self._deaths.append(_Death(child, cause))
        self._retry_at = 0.0
        if self._stopped_at is not None or (self._drain and has_ended and code == 0):
            return
        pause = 0.0
        if has_ended or child.board.has_started_a_job:
            self._early_deaths[child.place] = 0
        else:
            self._early_deaths[child.place] += 1
            excess = self._early_deaths[child.place] - EARLY_DEATHS
            if excess >= 0:
                pause = min(FIRST_PAUSE_SECONDS * 2**excess, LONGEST_PAUSE_SECONDS)
        self._to_fork.append((child.place, time.monotonic() + pause))

    def _cause(self, child: _Child, code: int) -> str:
        """Say how a worker process ended."""
        if code >= 0:
            return f"its worker process exited with status {code}"
        name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
        why = ""
        if -code == signal.SIGKILL and _out_of_memory_kills() > self._kills_before:
            why = ", since the machine was out of memory"
        elif child.overdue:
            why = ", since a job ran past its timeout and the grace"
        return f"its worker process was killed by signal {name}{why}"

    def _count_kills(self) -> None:
        """Forget kills of long ago: they were not about a worker that dies now."""
        now = time.monotonic()
        if now - self._kills_read_at > KILLS_EVERY_SECONDS:
            self._kills_before, self._kills_lately = self._kills_lately, _out_of_memory_kills()
            self._kills_read_at = now

    # -- the database --------------------------------------------------------

    def _attend(self) -> None:
        """Give back what the dead held and renew what the living cannot."""
        if time.monotonic() < self._retry_at:
            return
        try:
            if self._deaths:
                self._deaths = [death for death in self._deaths if not self._give_back(death)]
                if self._deaths:
                    self._retry_at = time.monotonic() + TICK_SECONDS
            for child in self._children.values():
                self._look_after(child)
        except (DatabaseError, InterfaceError):
            # Workers tell of an outage. Leases end by themselves; and this goes on.
            self._close()
            self._retry_at = time.monotonic() + TICK_SECONDS * 2

    def _give_back(self, death: _Death) -> bool:
        """Give back what a dead worker held; tell whether nothing is left to give back.

        Rows that somebody else has locked are, for the next time.
        """
        child = death.child
        entries = list(child.board.entries())
        started = [entry for entry in entries if entry.started]
        suspects = [entry for entry in entries if not entry.started and entry.suspect]
        others = [entry for entry in entries if not entry.started and not entry.suspect]
        to_give_back: list[queue.Held] = [*others]
        if child.board.is_incomplete:
            known = {entry.held for entry in entries}
            under = queue.held_under(self._own(), child.board.prefix)
            to_give_back += [_Unlisted(held) for held in under if held not in known]
        timed_out = [e for e in started if e.interrupted or e.job_id in child.overdue]
        killed = [e for e in started if e not in timed_out]
        if child.overdue or child.was_ended or child.board.has_ended:
            # It was ended, or ended by itself, and these have done nothing wrong.
            to_give_back += killed
            killed = []
        held = [*to_give_back, *suspects, *timed_out, *killed]
        if not held:
            return True
        connection = self._own()
        settled = (
            queue.give_back(connection, to_give_back)
            | queue.leave(connection, suspects)
            | queue.charge_timeouts(connection, timed_out)
            | queue.charge_deaths(connection, killed, death.cause)
        )
        if suspects or killed:
            for other in self._children.values():
                other.board.tell_of_suspects()
        # Idle workers look at once: what was given back is due.
        database_of(connection).notify(connection, [])
        rest = [claim for claim in held if claim.held[0] not in settled]
        return not rest or not queue.still_held(connection, rest)

    def _end_overdue(self) -> None:
        """Kill the workers whose jobs are long past their timeout."""
        now = time.monotonic()
        for child in self._children.values():
            overdue = {e.job_id for e in child.board.entries() if e.overdue_at < now}
            if overdue - child.overdue:
                child.overdue |= overdue
                _kill(child.pid, signal.SIGKILL)

    def _look_after(self, child: _Child) -> None:
        if child.is_paused:
            return
        now = time.monotonic()
        late: list[tuple[Entry, float]] = []
        unstarted: list[Entry] = []
        for entry in child.board.entries():
            ends = max(entry.lease_ends, child.renewed.get(entry.job_id, 0.0))
            if not entry.started and not entry.suspect and ends < now:
                unstarted.append(entry)  # not renewed: nobody knows when it could start
            elif entry.started and ends - now < entry.lease * LATE_BELOW:
                late.append((entry, entry.lease))
        if unstarted:
            queue.give_back(self._own(), unstarted, only_over=True)
        if not late:
            return
        renewed = queue.renew_for(self._own(), late)
        for entry, lease in late:
            if entry.job_id in renewed:
                child.renewed[entry.job_id] = now + lease

    def _own(self) -> BaseDatabaseWrapper:
        if self._connection is None:
            self._connection = database_of(self._alias).open(self._alias)
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close_quietly(connection)


def listen_to_stop_signals(handle: Callable[[int, FrameType | None], object]) -> None:
    """Handle the signals that tell a worker to stop; SIGHUP not under `nohup`."""
    for number in STOP_SIGNALS:
        if number not in HANG_UP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def _drain_at_end(pipe: int, worker: Worker) -> None:
    """Let a worker drain once nobody holds the pipe's writing end."""
    os.read(pipe, 1)
    worker.request_stop()


def _close_all_connections() -> None:
    for connection in connections.all(initialized_only=True):
        connection.close()
        if hasattr(connection, "close_pool"):
            connection.close_pool()  # with its threads, which a fork would not copy


def _flush() -> None:
    """Write what is buffered: a fork would copy it, and `_exit` drop it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _ignore(number: int, frame: FrameType | None) -> None:
    """A signal that only wakes the loop."""


def _drain_pipe(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 512):
            pass


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed for want of memory; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
