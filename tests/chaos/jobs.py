"""The handlers of the suite. Each tells the ledger of its begin and its end.

Their leases are short, so that a run of seconds sees many of them end.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from django.db import connection

from myxo_jobs import GiveUp, Jobs, Run, job
from tests.chaos import zoo
from tests.ledger import VARIABLE, Line

LEASE = 2.0
POISON_ATTEMPTS = 3


@cache
def _ledger() -> int:
    # Opened once: some faults leave no descriptor to open it with.
    return os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def write(event: str, name: str, run: Run, value: Any = None) -> None:
    """Append a line to the ledger with one write: evidence that outlives this process."""
    line = Line(event, name, run.id, run.attempt, os.getpid(), time.monotonic(), value)
    os.write(_ledger(), msgspec.json.encode(line) + b"\n")


@contextmanager
def recorded(number: int, run: Run) -> Iterator[None]:
    """Write the begin of a run, and `end` or `raise` after it."""
    name = str(number)
    write("begin", name, run)
    try:
        yield
    except BaseException as error:
        # What is sent to be stored, for the check of the row.
        value = type(error).__name__
        write("raise", name, run, value)
        raise
    write("end", name, run)


class Work(msgspec.Struct, frozen=True):
    """Take some seconds, perhaps ask the database something, perhaps raise at first."""

    number: int
    seconds: float = 0.0
    asks: bool = False
    raises: int = 0  # at so many attempts


@job(Work, workers=4, lease=LEASE, attempts=100, backoff=0.05)
def work(request: Work, run: Run) -> None:
    with recorded(request.number, run):
        if request.asks:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        time.sleep(request.seconds)
        if run.attempt <= request.raises:
            raise ValueError(f"attempt {run.attempt} of {request.number}")


SHORT_SECONDS = 0.05
SHORT_AT_ONCE = 10
SHORT_LEASE = 5.0


class Short(msgspec.Struct, frozen=True):
    """Take a while, with everything as it is by default."""

    number: int


@job(Short, workers=SHORT_AT_ONCE)
def short(request: Short, run: Run) -> None:
    with recorded(request.number, run):
        time.sleep(SHORT_SECONDS)


class Leased(msgspec.Struct, frozen=True):
    """The same, with the lease for workers that have no supervisor."""

    number: int


@job(Leased, workers=SHORT_AT_ONCE, lease=SHORT_LEASE)
def leased(request: Leased, run: Run) -> None:
    with recorded(request.number, run):
        time.sleep(SHORT_SECONDS)


class Long(msgspec.Struct, frozen=True):
    """Take longer than a lease."""

    number: int
    seconds: float


@job(Long, workers=2, lease=LEASE, attempts=100)
def long(request: Long, run: Run) -> None:
    with recorded(request.number, run):
        time.sleep(request.seconds)


class Stale(msgspec.Struct, frozen=True):
    """Have a first run that is short, and ends as `first` says; later ones as `then` says."""

    number: int
    first: str  # "returns" or "raises"
    then: str
    seconds: float  # of the later runs


@job(Stale, workers=8, lease=LEASE, attempts=20, backoff=0.05)
def stale(request: Stale, run: Run) -> None:
    with recorded(request.number, run):
        # Steps, since a stopped process sleeps on once it is continued.
        for _ in range(10):
            time.sleep((0.5 if run.attempt == 1 else request.seconds) / 10)
        if run.attempt == 1 and request.first == "raises":
            raise ValueError("the first run")
        if run.attempt > 1 and request.then == "raises":
            raise GiveUp("the second run")


class Poison(msgspec.Struct, frozen=True):
    """End the process."""

    number: int
    how: str


@job(Poison, lease=LEASE, attempts=POISON_ATTEMPTS)
def poison(request: Poison, run: Run) -> None:
    with recorded(request.number, run):
        POISONS[request.how]()


def _overflow_the_stack() -> None:
    sys.setrecursionlimit(10**9)
    callback = ctypes.CFUNCTYPE(None)
    call = callback(lambda: call())
    call()


POISONS = {
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(1),
    "abort": os.abort,
    "stack": _overflow_the_stack,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Zoo(msgspec.Struct, frozen=True):
    """Raise something strange."""

    number: int
    animal: str


@job(Zoo, workers=4, lease=LEASE, attempts=2, backoff=0.05)
def raise_strangely(request: Zoo, run: Run) -> None:
    with recorded(request.number, run):
        zoo.ANIMALS[request.animal]()


class Once(msgspec.Struct, frozen=True):
    """Run once for each key."""

    number: int
    seconds: float = 0.0


@job(Once, workers=4, lease=LEASE)
def once(request: Once, run: Run) -> None:
    with recorded(request.number, run):
        time.sleep(request.seconds)


RELAYED = 10_000_000  # is added to the number of the request that is put


class Relay(msgspec.Struct, frozen=True):
    """Put a job that is due after some seconds."""

    number: int
    delay: float


@job(Relay, workers=2, lease=LEASE, atomic=True)
def relay(request: Relay, run: Run) -> None:
    with recorded(request.number, run):
        write("relay", str(request.number), run, request.delay)
        Jobs().put(Work(RELAYED + request.number), delay=request.delay)


class Leak(msgspec.Struct, frozen=True):
    """Keep a megabyte."""

    number: int


LEAKED: list[bytes] = []


@job(Leak, workers=2, lease=LEASE)
def leak(request: Leak, run: Run) -> None:
    with recorded(request.number, run):
        LEAKED.append(os.urandom(2**20))


class Hang(msgspec.Struct, frozen=True):
    """Never end by itself."""

    number: int
    how: str


HANG_ATTEMPTS = 2
HANG_SECONDS = 1.0


@job(Hang, lease=LEASE, attempts=HANG_ATTEMPTS, timeout=HANG_SECONDS, backoff=0.05)
def hang(request: Hang, run: Run) -> None:
    with recorded(request.number, run):
        zoo.HANGS[request.how]()


class Frozen(msgspec.Struct, frozen=True):
    """Write to a disk that may be frozen: the kernel then lets nothing interrupt that."""

    number: int


@job(Frozen, lease=LEASE, attempts=100, timeout=HANG_SECONDS, backoff=0.05)
def write_to_a_disk(request: Frozen, run: Run) -> None:
    with recorded(request.number, run):
        Path(os.environ["MYXO_CHAOS_DISK"], str(request.number)).write_text("x")


class AsyncHang(msgspec.Struct, frozen=True):
    """Never end by itself, in the event loop."""

    number: int


@job(AsyncHang, lease=LEASE, attempts=HANG_ATTEMPTS, timeout=HANG_SECONDS, backoff=0.05)
async def hang_in_the_loop(request: AsyncHang, run: Run) -> None:
    with recorded(request.number, run):
        await asyncio.Event().wait()


class Async(msgspec.Struct, frozen=True):
    """Ask the database something, in the event loop."""

    number: int


@job(Async, workers=4, lease=LEASE)
async def ask_in_the_loop(request: Async, run: Run) -> None:
    from myxo_jobs.models import Job

    with recorded(request.number, run):
        await Job.objects.filter(pk=0).aexists()


class Litter(msgspec.Struct, frozen=True):
    """Leave something behind in the process, or look whether somebody has."""

    number: int
    what: str


@job(Litter, lease=LEASE, attempts=1)
def litter(request: Litter, run: Run) -> None:
    with recorded(request.number, run):
        zoo.LITTER[request.what]()


class Dirt(msgspec.Struct, frozen=True):
    """Leave something behind in the connection, or look whether somebody has."""

    number: int
    what: str


@job(Dirt, lease=LEASE, attempts=1)
def dirty(request: Dirt, run: Run) -> None:
    with recorded(request.number, run):
        zoo.DIRT[request.what]()


class Echo(msgspec.Struct, frozen=True):
    """Tell the ledger what came."""

    number: int
    value: Any


@job(Echo, workers=2, lease=LEASE)
def echo(request: Echo, run: Run) -> None:
    with recorded(request.number, run):
        digest = hashlib.sha256(msgspec.json.encode(request.value)).hexdigest()
        write("echo", str(request.number), run, digest)


class Changed(msgspec.Struct, frozen=True):
    """Has a field that older payloads lack, and lacks one that they have."""

    number: int
    added: int
    added_with_a_default: int = 0


@job(Changed, lease=LEASE)
def changed(request: Changed, run: Run) -> None:
    with recorded(request.number, run):
        pass


class Flood(msgspec.Struct, frozen=True):
    """Be one of very many, with the usual lease: so many processes get little time each."""

    number: int


@job(Flood, workers=4)
def flood(request: Flood, run: Run) -> None:
    with recorded(request.number, run):
        pass


class Rare(msgspec.Struct, frozen=True):
    """Be put seldom, beside a busy topic; with the usual lease, as the flood."""

    number: int


@job(Rare)
def rare(request: Rare, run: Run) -> None:
    with recorded(request.number, run):
        pass


if os.environ.get("MYXO_CHAOS_VERSION") == "broken":
    raise RuntimeError("this version of the jobs cannot be imported")

if os.environ.get("MYXO_CHAOS_VERSION") != "old":

    class Newest(msgspec.Struct, frozen=True):
        """What only the newest version knows."""

        number: int

    @job(Newest, workers=4, lease=LEASE, attempts=1)
    def newest(request: Newest, run: Run) -> None:
        with recorded(request.number, run):
            pass


if os.environ.get("MYXO_CHAOS_SERVICES"):
    from tests.chaos import services  # noqa: F401 - it registers them
