"""`manage.py runjobs`: run a worker in this process until it is told to stop."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
from argparse import ArgumentParser
from contextlib import suppress
from types import FrameType
from typing import Any

import msgspec
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.utils.autoreload import get_child_arguments

from myxo_jobs import checks, queue
from myxo_jobs.databases import database_of
from myxo_jobs.worker import Supervisor, Worker
from myxo_jobs.worker.supervisor import HANG_UP, STOP_SIGNALS, listen_to_stop_signals

WAIT_SECONDS = 0.5
# How long a worker gets, after the grace, to end by itself.
LEAVE_SECONDS = 2.0
# A pipe that can be written to takes so much without waiting (PIPE_BUF of Linux); a
# character may be four bytes.
PIECE = 1024
LOG_PATIENCE_SECONDS = 0.2
# How a process that replaces itself hands on the runs that it could not interrupt.
TIMED_OUT_VARIABLE = "MYXO_JOBS_TIMED_OUT"


class Command(BaseCommand):
    help = "Run the jobs of the topics that have a handler here, until told to stop by a signal."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--topics", help="only these, separated by commas")
        parser.add_argument("--exclude", help="all but these, separated by commas")
        parser.add_argument("--workers", type=int, help="slots of every topic, instead of its own")
        parser.add_argument(
            "--processes", type=int, help="so many worker processes, under a supervisor"
        )
        parser.add_argument("--drain", action="store_true", help="exit once nothing is due")
        parser.add_argument(
            "--grace", type=float, help="seconds that running jobs get to end (grace_seconds)"
        )
        parser.add_argument(
            "--poll", type=float, help="seconds after which an idle worker looks (poll_seconds)"
        )
        parser.add_argument(
            "--max-rss", type=float, help="MiB of memory above which a worker process is replaced"
        )
        parser.add_argument(
            "--max-jobs", type=int, help="jobs after which a worker process is replaced"
        )
        parser.add_argument("--using", help="alias of the queue's database")

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Run the system checks, as far as a database that is away now lets them.

        From Django 6.1 on, those of a model with a generated column connect to it.
        """
        with suppress(OperationalError, InterfaceError):
            super().check(*args, **kwargs)

    def handle(self, **options: Any) -> None:
        _check(options)
        try:
            worker = _make_worker(options, watchdog=options["processes"] is None)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        _refuse_what_cannot_work(worker)
        _show_events()
        if options["processes"] is None:
            _run_alone(worker)
        else:
            _run_under_a_supervisor(worker, options)


def _run_alone(worker: Worker) -> None:
    if threading.current_thread() is threading.main_thread():
        listen_to_stop_signals(_Stop(worker))
        _let_signals_through()  # those that came while this process replaced another
    _charge_timed_out(worker.alias)
    worker.start()
    while not worker.join(WAIT_SECONDS):
        pass
    if worker.worn:
        _hold_signals()
        if not worker.was_stopped:
            _start_afresh(worker)
        _let_signals_through()
    if any(thread.name.startswith("myxo_jobs") for thread in threading.enumerate()):
        # A handler did not end within the grace; its job was given back.
        _exit_now(0)
    if worker.was_stopped:
        _end_soon()


def _run_under_a_supervisor(pattern: Worker, options: dict[str, Any]) -> None:
    """Run worker processes made like `pattern`, which itself is never started."""
    supervisor = Supervisor(
        options["processes"],
        lambda board: _make_worker(options, board=board),
        alias=pattern.alias,
        grace=pattern.grace,
        drain=pattern.drain,
    )
    status = supervisor.run()
    _end_soon()
    if status:
        sys.exit(status)


def _make_worker(options: dict[str, Any], **more: Any) -> Worker:
    return Worker(
        topics=_names(options["topics"]),
        exclude=_names(options["exclude"]),
        workers=options["workers"],
        using=options["using"],
        drain=options["drain"],
        grace=options["grace"],
        poll=options["poll"],
        max_jobs=options["max_jobs"],
        max_rss=options["max_rss"],
        **more,
    )


class _TimedOut(msgspec.Struct, frozen=True):
    """A run that could not be interrupted, until its process has ended."""

    held: tuple[int, str]
    pause: float
    is_last_attempt: bool
    is_for_a_worker: bool


def _start_afresh(worker: Worker) -> None:
    """Replace this process by a fresh one; never returns.

    It is told of the runs that this one could not interrupt: they end with it.
    """
    left = [
        _TimedOut(
            claim.held,
            claim.handler.pause_after(claim.attempt),
            claim.attempt >= claim.handler.attempts,
            claim.handler.failure_needs_a_worker,
        )
        for claim in worker.timed_out
    ]
    os.environ[TIMED_OUT_VARIABLE] = msgspec.json.encode(left).decode()
    _flush()
    arguments = get_child_arguments()
    os.execv(arguments[0], arguments)  # noqa: S606 - this very command


def _charge_timed_out(alias: str) -> None:
    """Record the runs that ended with the process which this one replaces."""
    left = msgspec.json.decode(os.environ.pop(TIMED_OUT_VARIABLE, "[]"), type=list[_TimedOut])
    if not left:
        return
    try:
        connection = database_of(alias).open(alias)
    except (DatabaseError, InterfaceError):
        return  # their leases end, and they run again
    try:
        queue.charge_timeouts(connection, left)
    except (DatabaseError, InterfaceError):
        return
    finally:
        connection.close()


def _hold_signals() -> None:
    """Let signals to stop wait: none may fall between this process and the one after it."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _let_signals_through() -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class _Stop:
    """Drains at the first signal, and leaves at the second."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number in HANG_UP:
            return  # a terminal and its shell both tell of one end
        if self._asked:
            _exit_now(128 + number)
        self._asked = True
        self._worker.request_stop()
        # A statement that meets a locked table may wait far beyond the grace.
        leave = threading.Timer(self._worker.grace + LEAVE_SECONDS, _exit_now, [0])
        leave.daemon = True
        leave.start()


def _end_soon() -> None:
    """Let the interpreter end without going through all objects once more.

    That takes a tenth of a second of CPU time, and seconds on a machine that is busy.
    """
    gc.freeze()


def _exit_now(status: int) -> None:
    """End the process, whatever its threads do."""
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # It may be missing, closed by a handler, or read by nobody.
        with suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _names(text: str | None) -> list[str] | None:
    """Return the names in an option; an empty list where it names none."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _check(options: dict[str, Any]) -> None:
    if options["using"] is not None and options["using"] not in connections:
        raise CommandError(f"--using {options['using']}: DATABASES has {', '.join(connections)}")
    if options["workers"] is not None and options["workers"] < 1:
        raise CommandError(f"--workers takes a whole number from 1, not {options['workers']}")
    for name in ("processes", "max_jobs"):
        if options[name] is not None and options[name] < 1:
            flag = name.replace("_", "-")
            raise CommandError(f"--{flag} takes a whole number from 1, not {options[name]}")
    if options["processes"] is not None and not hasattr(os, "fork"):
        raise CommandError("--processes needs fork(), which this system has not")
    if options["max_rss"] is not None and not options["max_rss"] > 0:
        raise CommandError(f"--max-rss takes MiB above 0, not {options['max_rss']}")
    if options["grace"] is not None and not options["grace"] >= 0:
        raise CommandError(f"--grace takes seconds from 0, not {options['grace']}")
    if options["poll"] is not None and not options["poll"] > 0:
        raise CommandError(f"--poll takes seconds above 0, not {options['poll']}")


def _refuse_what_cannot_work(worker: Worker) -> None:
    """Raise CommandError for a database in which this worker could not do its jobs.

    One that is away now is waited for.
    """
    alias = worker.alias
    found = checks.memory(alias)
    found += checks.pool_too_small(alias, checks.connections_needed(worker.handlers))
    try:
        found += checks.table(alias)
    except (OperationalError, InterfaceError):
        pass
    finally:
        connections[alias].close()
    if found:
        raise CommandError("\n".join(f"{message.msg} {message.hint}" for message in found))


class _PatientHandler(logging.Handler):
    """Writes to standard error, but not where it would wait for a reader who does not read.

    It would wait for ever, and with it every thread that has something to log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{self.format(record)}\n"
            if self._lost and self._may_write():
                text = f"{self._lost} lines of the log are lost: nobody read it\n{text}"
                self._lost = 0
            for start in range(0, len(text), PIECE):
                if not self._may_write():
                    self._lost += 1
                    return
                sys.stderr.write(text[start : start + PIECE])
                sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _may_write(self) -> bool:
        try:
            wait = 0.0 if self._lost else LOG_PATIENCE_SECONDS
            return bool(select.select([], [sys.stderr], [], wait)[1])
        except (OSError, ValueError, AttributeError):
            return True  # not something to wait for


def _show_events() -> None:
    """Show the worker's events on standard error where the project logs them nowhere."""
    logger = logging.getLogger("myxo_jobs")
    if logger.hasHandlers():
        return
    handler = _PatientHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
