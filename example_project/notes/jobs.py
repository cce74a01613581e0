"""The work of this app: words are counted for each note, and people export their notes."""

from __future__ import annotations

import csv
import time
from typing import Any

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from example_project.notes import ledger
from example_project.notes.models import Note
from myxo_jobs import GiveUp, Jobs, Run, job
from myxo_jobs.services import JobService, register
from myxo_jobs.services.rows import ServiceJob

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


def _notes_of(job: ServiceJob) -> QuerySet[Note]:
    return Note.objects.filter(author_id=int(job.owner_id or 0))


def _cell(text: str) -> str:
    """Return a text as a spreadsheet shows it: one that begins as a formula does is none."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


@register
class ExportNotes(JobService):
    """All notes of the owner, as a CSV file."""

    kind = "export"
    title = "Export of my notes"

    def process(self, job: ServiceJob) -> dict[str, Any]:
        notes = _notes_of(job).order_by("pk")
        if not notes.exists():
            raise GiveUp("You have not written any notes yet.")
        with job.file("notes.csv", text=True) as file:
            rows = csv.writer(file)
            rows.writerow(["title", "text"])
            for note in job.track(notes):
                rows.writerow([_cell(note.title), _cell(note.text)])
                time.sleep(settings.EXPORT_PAUSE_SECONDS)
        return {"item_count": notes.count(), "bytes_out": file.size}


@register
class Statistics(JobService):
    """How many notes and words the owner has, counted in an event loop."""

    kind = "statistics"
    title = "Statistics of my notes"

    async def process(self, job: ServiceJob) -> dict[str, int]:
        notes = _notes_of(job)
        total, words, done = await notes.acount(), 0, 0
        async for note in notes:
            done += 1
            words += len(note.text.split())
            job.progress(done, total, "Reading notes")
        return {"item_count": done, "words": words}
