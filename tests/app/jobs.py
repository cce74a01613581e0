"""The handlers of the test app: those that a real `runjobs` process knows.

Each writes what it does into the ledger of the test (see tests/ledger.py).
"""

from __future__ import annotations

import time

import msgspec

from myxo_jobs import Jobs, Run, job
from tests import ledger
from tests.app.models import Note

jobs = Jobs()


class CountWords(msgspec.Struct, frozen=True):
    """Count the words of a note, as the README does."""

    note_id: int


@job(CountWords, workers=2)
def count(request: CountWords) -> None:
    note = Note.objects.get(pk=request.note_id)
    Note.objects.filter(pk=note.pk).update(words=len(note.text.split()))


class Work(msgspec.Struct, frozen=True):
    """Write a begin line, take some seconds, write an end line."""

    name: str
    seconds: float = 0.0


@job(Work, workers=2, lease=2.0)
def work(request: Work, run: Run) -> None:
    ledger.write("begin", name=request.name, job=run.id, attempt=run.attempt)
    time.sleep(request.seconds)
    ledger.write("end", name=request.name, job=run.id, attempt=run.attempt)


class Break(msgspec.Struct, frozen=True):
    """Raise, on every attempt."""

    name: str


@job(Break, attempts=3, backoff=0.05)
def break_(request: Break, run: Run) -> None:
    ledger.write("begin", name=request.name, job=run.id, attempt=run.attempt)
    raise ValueError(f"{request.name} is broken")
