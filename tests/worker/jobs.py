"""The handlers that the tests of the worker run in real processes.

Their leases are short, so that a test sees one end within seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import locale
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from django.db import transaction

from myxo_jobs import GiveUp, Run, Snooze, job
from myxo_jobs.models import Job
from tests import ledger
from tests.app.models import Note


def begin(name: str, run: Run) -> None:
    ledger.write("begin", name=name, job=run.id, attempt=run.attempt)


def end(name: str, run: Run) -> None:
    ledger.write("end", name=name, job=run.id, attempt=run.attempt)


class Slow(msgspec.Struct, frozen=True):
    """Take some seconds, one at a time."""

    name: str
    seconds: float = 0.0


@job(Slow, lease=2.0)
def slow(request: Slow, run: Run) -> None:
    begin(request.name, run)
    time.sleep(request.seconds)
    end(request.name, run)


class Tiny(msgspec.Struct, frozen=True):
    """Take no time."""

    name: str


@job(Tiny, workers=4)
def tiny(request: Tiny, run: Run) -> None:
    begin(request.name, run)


class Blocking(msgspec.Struct, frozen=True):
    """Hold the event loop for some seconds."""

    name: str
    seconds: float = 0.0


@job(Blocking, workers=4, lease=2.0)
async def blocking(request: Blocking, run: Run) -> None:
    begin(request.name, run)
    time.sleep(request.seconds)  # noqa: ASYNC251 - what this handler is for
    end(request.name, run)


class Patient(msgspec.Struct, frozen=True):
    """Work until the worker drains, then stop early."""

    name: str


@job(Patient)
def patient(request: Patient, run: Run) -> None:
    begin(request.name, run)
    while not run.should_stop:
        time.sleep(0.01)
    raise Snooze(0)


class Late(msgspec.Struct, frozen=True):
    """Succeed at the first attempt, give up at the second."""

    name: str


@job(Late, lease=1.0)
def late(request: Late, run: Run) -> None:
    begin(request.name, run)
    if run.attempt > 1:
        raise GiveUp("the second attempt says so")
    time.sleep(1.0)
    end(request.name, run)


class Deadly(msgspec.Struct, frozen=True):
    """Kill the process it runs in, or do nothing."""

    name: str
    kills: bool = False


@job(Deadly, attempts=2, lease=1.0)
def deadly(request: Deadly, run: Run) -> None:
    begin(request.name, run)
    if request.kills:
        os.kill(os.getpid(), signal.SIGKILL)


class Fatal(msgspec.Struct, frozen=True):
    """Take half a second and kill the process, or take longer and live."""

    name: str
    kills: bool = False


def be_fatal(request: Fatal, run: Run) -> None:
    begin(request.name, run)
    time.sleep(0.5 if request.kills else 1.5)
    if request.kills:
        os.kill(os.getpid(), signal.SIGKILL)
    end(request.name, run)


@job(Fatal, workers=2, attempts=3, lease=1.0, backoff=0.1)
def fatal(request: Fatal, run: Run) -> None:
    be_fatal(request, run)


class OftenFatal(Fatal, frozen=True):
    """The same, with more attempts."""


@job(OftenFatal, workers=2, attempts=10, lease=1.0, backoff=0.1)
def often_fatal(request: OftenFatal, run: Run) -> None:
    be_fatal(request, run)


class Overtaken(msgspec.Struct, frozen=True):
    """Take a second in one attempt, for another to overtake it, and give up in others."""

    name: str
    slow_attempt: int = 1
    raises: bool = False
    others_return: bool = False


@job(Overtaken, attempts=2, lease=1.0, backoff=0.1)
def overtaken(request: Overtaken, run: Run) -> None:
    begin(request.name, run)
    if run.attempt == request.slow_attempt:
        time.sleep(1.0)
        end(request.name, run)
        if request.raises:
            raise LookupError("too late")
    elif not request.others_return:
        raise GiveUp("another attempt says so")


class WriteNote(msgspec.Struct, frozen=True):
    """Write a note, then take some seconds at the first attempt."""

    text: str
    seconds: float = 0.0


@job(WriteNote, atomic=True, lease=1.0)
def write_note(request: WriteNote, run: Run) -> None:
    Note.objects.create(text=request.text)
    begin(request.text, run)
    if run.attempt == 1:
        time.sleep(request.seconds)


class Query(msgspec.Struct, frozen=True):
    """Make a query of ten kilobytes, and tell how much memory the process has used."""

    number: int


@job(Query, workers=4)
def query(request: Query, run: Run) -> None:
    Note.objects.filter(text="a" * 10_000).exists()
    if request.number % 100 == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ledger.write("peak", name=str(request.number), value=peak)


class Fail(msgspec.Struct, frozen=True):
    """Log a line, then fail for good."""

    name: str


@job(Fail, attempts=1)
def fail(request: Fail, run: Run) -> None:
    logging.getLogger("shop").warning("about to fail: %s", request.name)
    raise ValueError(f"cannot be done: {request.name}")


class Steady(msgspec.Struct, frozen=True):
    """Take some seconds, under a lease that no test waits for."""

    name: str
    seconds: float = 0.0


@job(Steady)
def steady(request: Steady, run: Run) -> None:
    begin(request.name, run)
    time.sleep(request.seconds)
    end(request.name, run)


def sleep_in_c(seconds: float) -> None:
    """Sleep without letting any other thread have the interpreter."""
    # The worker's loop comes to rest first: frozen in a transaction it locks SQLite's file.
    time.sleep(0.3)
    ctypes.PyDLL(None).sleep(int(seconds))


class Frozen(msgspec.Struct, frozen=True):
    """Keep the interpreter for some seconds."""

    name: str
    seconds: float = 0.0


@job(Frozen, lease=1.0)
def frozen(request: Frozen, run: Run) -> None:
    begin(request.name, run)
    sleep_in_c(request.seconds)
    end(request.name, run)


class FrozenAsync(msgspec.Struct, frozen=True):
    """Keep the interpreter, and the event loop with it, for some seconds."""

    name: str
    seconds: float = 0.0


@job(FrozenAsync, workers=2, lease=1.0)
async def frozen_async(request: FrozenAsync, run: Run) -> None:
    begin(request.name, run)
    sleep_in_c(request.seconds)
    end(request.name, run)


class Die(msgspec.Struct, frozen=True):
    """Do nothing, or end the process it runs in."""

    how: str


DEATHS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "aborted": os.abort,
    "left": lambda: os._exit(0),
    "lives": lambda: None,
}


@job(Die, attempts=2)
def die(request: Die, run: Run) -> None:
    begin(request.how, run)
    DEATHS[request.how]()


class Hang(msgspec.Struct, frozen=True):
    """Take longer than allowed in the first runs, and no time after them."""

    how: str
    runs: int = 1


def loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def swallow(seconds: float) -> None:
    try:
        loop(seconds)
    except BaseException:  # what this handler is for
        return


def be_deaf(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        swallow(seconds)


HANGS = {
    "loop": loop,
    "sleep": time.sleep,
    "sleep in C": sleep_in_c,
    "swallow": swallow,
    "deaf": be_deaf,
}


@job(Hang, workers=2, timeout=0.5, attempts=2, backoff=0.25, lease=3.0)
def hang(request: Hang, run: Run) -> None:
    begin(request.how, run)
    if run.attempt <= request.runs:
        HANGS[request.how](60)
    end(request.how, run)


class HangAsync(msgspec.Struct, frozen=True):
    """The same, async."""

    how: str
    runs: int = 1


async def swallow_async(seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return


async def be_deaf_async(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await swallow_async(seconds)


async def block(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - what this handler is for


ASYNC_HANGS = {
    "await": asyncio.sleep,
    "swallow": swallow_async,
    "deaf": be_deaf_async,
    "block": block,
}


@job(HangAsync, workers=2, timeout=0.5, attempts=2, backoff=0.25, lease=3.0)
async def hang_async(request: HangAsync, run: Run) -> None:
    begin(request.how, run)
    if run.attempt <= request.runs:
        await ASYNC_HANGS[request.how](60)
    end(request.how, run)


class HangAtomic(msgspec.Struct, frozen=True):
    """Write a note, then take longer than allowed in the first run."""

    text: str
    how: str


@job(HangAtomic, atomic=True, timeout=0.5, attempts=2, backoff=0.25)
def hang_atomic(request: HangAtomic, run: Run) -> None:
    Note.objects.create(text=f"{request.text} {run.attempt}")
    begin(request.text, run)
    if run.attempt == 1:
        HANGS[request.how](60)


class Grow(msgspec.Struct, frozen=True):
    """Keep some memory for good."""

    name: str
    mib: int


kept: list[bytes] = []


@job(Grow)
def grow(request: Grow, run: Run) -> None:
    begin(request.name, run)
    kept.append(b"x" * (request.mib * 1024 * 1024))


class Tally(msgspec.Struct, frozen=True):
    """Count the words of a note in a block that begins with a write."""

    note_id: int


@job(Tally, workers=3)
def tally(request: Tally, run: Run) -> None:
    begin(str(request.note_id), run)
    with transaction.atomic():
        Note.objects.filter(pk=request.note_id).update(words=0)
        note = Note.objects.get(pk=request.note_id)
        note.words = len(note.text.split())
        note.save()


class Mute(msgspec.Struct, frozen=True):
    """Close standard output, then take some seconds."""

    name: str
    seconds: float = 0.0


@job(Mute)
def mute(request: Mute, run: Run) -> None:
    sys.stdout.close()
    begin(request.name, run)
    time.sleep(request.seconds)


class Fork(msgspec.Struct, frozen=True):
    """Fork, and let the copy come back from the handler, or raise in it."""

    name: str
    raises: bool = False


@job(Fork)
def fork(request: Fork, run: Run) -> None:
    begin(request.name, run)
    if os.fork() == 0 and request.raises:
        raise SystemExit


class ForkAtomic(msgspec.Struct, frozen=True):
    """As Fork, in the job's transaction."""

    name: str


@job(ForkAtomic, atomic=True)
def fork_in_a_transaction(request: ForkAtomic, run: Run) -> None:
    Note.objects.create(text=request.name)
    os.fork()


class ForkAsync(msgspec.Struct, frozen=True):
    """As Fork, in the event loop."""

    name: str


@job(ForkAsync)
async def fork_in_the_loop(request: ForkAsync, run: Run) -> None:
    begin(request.name, run)
    os.fork()


class Shared(msgspec.Struct, frozen=True):
    """Change what the process has once for all jobs, or tell how it is."""

    name: str
    what: str = "look"


def how_it_is() -> list[str]:
    mask = os.umask(0)
    os.umask(mask)
    print("printed")
    return [str(Path.cwd()), oct(mask), locale.setlocale(locale.LC_ALL), str(sys.stderr.closed)]


CHANGES: dict[str, Callable[[], object]] = {
    "a folder": lambda: os.chdir("/"),
    "a umask": lambda: os.umask(0o123),
    "a locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "no output": lambda: sys.stdout.close(),
    "no errors": lambda: sys.stderr.close(),
}


@job(Shared)
def shared(request: Shared, run: Run) -> None:
    if request.what == "look":
        ledger.write("look", name=request.name, job=run.id, value=how_it_is())
    else:
        CHANGES[request.what]()


class SharedAsync(msgspec.Struct, frozen=True):
    """As Shared, in the event loop."""

    name: str
    what: str


@job(SharedAsync)
async def shared_by_the_loop(request: SharedAsync, run: Run) -> None:
    CHANGES[request.what]()


class Leave(msgspec.Struct, frozen=True):
    """Leave a child process and a thread behind."""

    seconds: float


@job(Leave)
def leave(request: Leave) -> None:
    subprocess.Popen(["sleep", str(request.seconds)])
    threading.Thread(target=time.sleep, args=(request.seconds,), name="left 1", daemon=True).start()
    subprocess.run(["sleep", "0.1"], check=True)


class Child(msgspec.Struct, frozen=True):
    """Wait for a child process and for a thread."""

    name: str
    seconds: float


@job(Child)
def wait_for_a_child(request: Child, run: Run) -> None:
    thread = threading.Thread(target=time.sleep, args=(request.seconds,))
    thread.start()
    subprocess.run(["sleep", str(request.seconds)], check=True)
    thread.join()
    end(request.name, run)


class Vanishing(msgspec.Struct, frozen=True):
    """Kill the process it runs in; what it left is cleaned up."""

    name: str


def clean_up_vanished(row: Job) -> None:
    ledger.write("cleanup", name=msgspec.json.decode(row.payload)["name"], job=row.pk)


@job(Vanishing, attempts=2, lease=1.0, backoff=0.1, cleanup=clean_up_vanished)
def vanish(request: Vanishing, run: Run) -> None:
    begin(request.name, run)
    os.kill(os.getpid(), signal.SIGKILL)


class Limited(msgspec.Struct, frozen=True):
    """Take some seconds; at most two of them at once, in all workers together."""

    name: str
    seconds: float = 0.0


@job(Limited, workers=2, limit=2, lease=2.0)
def limited(request: Limited, run: Run) -> None:
    begin(request.name, run)
    time.sleep(request.seconds)
    end(request.name, run)
