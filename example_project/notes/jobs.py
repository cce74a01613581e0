"""The job of this app: count the words of a note."""

from __future__ import annotations

import msgspec
from django.db import transaction

from example_project.notes import ledger
from example_project.notes.models import Note
from myxo_jobs import GiveUp, Jobs, Run, job

jobs = Jobs()


class CountWords(msgspec.Struct, frozen=True):
    note_id: int


# A count takes milliseconds, so a job of a worker that died may run again soon.
@job(CountWords, workers=2, lease=5)
def count(request: CountWords, run: Run) -> None:
    ledger.record(run.id)
    note = Note.objects.get(pk=request.note_id)
    if note.kind == Note.Kind.BROKEN:
        raise GiveUp("the note is broken: make it a plain one, then retry this job")
    words = len(note.text.split())
    # Not if it was edited meanwhile: the job of that edit counts the newer text.
    Note.objects.filter(pk=note.pk, text=note.text).update(words=words)


def save_and_count(note: Note) -> None:
    """Save a note and put the job that counts its words: both, or neither.

    Each save puts a job of its own. With a key, the put would do nothing while the
    job of an earlier save is running, which may have read the earlier text.
    """
    note.words = None
    with transaction.atomic():
        note.save()
        jobs.put(CountWords(note_id=note.pk))
