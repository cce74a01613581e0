"""The handlers: each does the least that a scenario needs, and notes that it ran."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from django.conf import settings
from django.db import connection

from myxo_jobs import Jobs, job
from myxo_jobs.services import JobService, ZipEntry, ZipService, register
from myxo_jobs.services.rows import ServiceJob
from tests.app.models import Note
from tests.benchmarks.evidence import Evidence, write_down

NOTES = 1_000

jobs = Jobs()
evidence = Evidence()


class Noop(msgspec.Struct, frozen=True):
    number: int


@job(Noop, topic="benchmark.noop")
def noop(request: Noop) -> None:
    evidence.note(request.number)


class Unserved(msgspec.Struct, frozen=True):
    """Put while a worker is busy with other jobs, so that only the put is measured."""

    number: int


@job(Unserved, topic="benchmark.unserved")
def unserved(request: Unserved) -> None:
    evidence.note(request.number)


class Timed(msgspec.Struct, frozen=True):
    number: int


@job(Timed, topic="benchmark.timed")
def timed(request: Timed) -> None:
    evidence.note_moment(request.number)


class AsyncNoop(msgspec.Struct, frozen=True):
    number: int


@job(AsyncNoop, topic="benchmark.async", workers=100)
async def async_noop(request: AsyncNoop) -> None:
    evidence.note(request.number)


class UpdateNote(msgspec.Struct, frozen=True):
    number: int


@job(UpdateNote, topic="benchmark.orm")
def update_note(request: UpdateNote) -> None:
    update_by_orm(request.number)
    evidence.note(request.number)


def update_by_orm(number: int) -> None:
    Note.objects.filter(pk=number % NOTES + 1).update(words=number)


class UpdateAtomically(msgspec.Struct, frozen=True):
    number: int


@job(UpdateAtomically, topic="benchmark.atomic", atomic=True)
def update_atomically(request: UpdateAtomically) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE notes_note SET words = %s WHERE id = %s",
            [request.number, request.number % NOTES + 1],
        )
    evidence.note(request.number)


class Written(msgspec.Struct, frozen=True):
    number: int


@job(Written, topic="benchmark.written")
def written(request: Written) -> None:
    """Note the run in a file: for workers that are processes of `runjobs`."""
    write_down(request.number)


class KeptNoop(msgspec.Struct, frozen=True):
    number: int


@job(KeptNoop, topic="benchmark.kept", keep=3600)
def kept_noop(request: KeptNoop) -> int:
    evidence.note(request.number)
    return request.number


LIMIT, LIMITED_SECONDS = 2, 0.5


class Limited(msgspec.Struct, frozen=True):
    number: int


@job(Limited, topic="benchmark.limited", workers=LIMIT, limit=LIMIT, lease=2.0)
def limited(request: Limited) -> None:
    """Note begin and end in a file."""
    write_down(request.number)
    time.sleep(LIMITED_SECONDS)
    write_down(-1 - request.number)


class Blocked(msgspec.Struct, frozen=True):
    number: int


@job(Blocked, topic="benchmark.blocked", workers=4, limit=LIMIT)
def blocked(request: Blocked) -> None:
    time.sleep(0.05)


CALLS = 5_000_000


@register
class Count(JobService):
    """Tell of each of so many steps; return the seconds that took."""

    kind = "benchmark.count"
    payload_type = None

    def process(self, job: ServiceJob) -> float:
        total = job.payload["calls"]
        began = time.perf_counter()
        for number in range(total):
            job.progress(number, total)
        return time.perf_counter() - began


class Failing(msgspec.Struct, frozen=True):
    number: int


@job(Failing, topic="benchmark.failing", workers=4, attempts=3, backoff=1.0)
def failing(request: Failing) -> None:
    raise ConnectionRefusedError("the service behind this handler is down")


@register
class ZipFolder(ZipService):
    """Zip what is in a folder of the storage, which the payload names."""

    kind = "benchmark.zip"
    payload_type = None

    def entries(self, job: ServiceJob) -> Iterator[ZipEntry]:
        folder = Path(settings.FILES, job.payload["folder"])
        # No paths: so many of them would be half of the worker's memory.
        for name in sorted(os.listdir(folder)) if folder.exists() else ():  # noqa: PTH208
            yield ZipEntry(f"{folder.name}/{name}", name=f"notes/{name}")
