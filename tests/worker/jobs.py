"""The handlers that the tests of the worker run in real processes.

Their leases are short, so that a test sees one end within seconds.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import time

import msgspec
from django.db import transaction

from myxo_jobs import GiveUp, Run, Snooze, job
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
