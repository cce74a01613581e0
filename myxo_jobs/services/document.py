"""The status document: what an owner, and a script for them, is told of a job."""

from __future__ import annotations

import math
import posixpath
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from django.urls import NoReverseMatch, reverse
from django.utils import timezone

from myxo_jobs.services.files import folder_of_file
from myxo_jobs.services.names import clean_name
from myxo_jobs.services.service import JobService, services

if TYPE_CHECKING:
    from myxo_jobs.services.rows import ServiceJob

ENDED = ("done", "failed")
# How far jobs before a waiting one are counted.
MOST_AHEAD = 100
MOST_SECONDS = 15
# What is asked again after a twentieth of the job's age is late by so much at most.
SHARE_OF_AGE = 20


class StoredFile(msgspec.Struct, frozen=True):
    """The file of a done job: where it is, and what its owner knows it as."""

    storage: str
    stored_name: str
    name: str
    bytes: int


def job_document(job: ServiceJob) -> dict[str, Any]:
    """Return what the owner of a job may know of it: the status document, ready for JSON.

    What an earlier end has left on a job that waits or runs again is not shown.
    """
    from myxo_jobs.services.rows import speaking

    file = file_of(job)
    with speaking(job):
        result = service_for(job).public_result(job) if job.status == "done" else None
    return {
        **_brief(job),
        "ahead": _ahead(job) if job.status == "pending" else None,
        "result": result,
        "file": {"name": file.name, "bytes": file.bytes} if file else None,
        "download_url": address("download", job) if file else None,
        "cancel_url": address("cancel", job) if can_cancel(job) else None,
    }


def listed_document(job: ServiceJob, *, has_file: bool) -> dict[str, Any]:
    """Return what a list tells of a job: what is read without its result, and its addresses."""
    return {
        **_brief(job),
        "url": address("job", job),
        "download_url": address("download", job) if has_file else None,
    }


def _brief(job: ServiceJob) -> dict[str, Any]:
    from myxo_jobs.services.rows import speaking

    with speaking(job):
        title = title_of(job)
    has_ended, has_failed = job.status in ENDED, job.status == "failed"
    return {
        "uid": str(job.uid),
        "kind": job.kind,
        "title": title,
        "status": job.status,
        "cancelling": is_cancelling(job),
        "reason": (job.reason or "") if has_failed else "",
        "message": (job.message or "") if has_failed else "",
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "progress": _progress(job),
        "created_at": _moment(job.created_at),
        "started_at": _moment(job.started_at),
        "updated_at": _moment(changed_at(job)),
        "completed_at": _moment(job.completed_at if has_ended else None),
        "expires_at": _moment(job.expires_at if has_ended else None),
    }


def service_for(job: ServiceJob) -> JobService:
    """Return the service of a job; for other kept jobs one that only has the defaults."""
    return services.get(job.kind) or JobService()


def title_of(job: ServiceJob) -> str:
    return service_for(job).shown_title or job.kind


def is_cancelling(job: ServiceJob) -> bool:
    return job.status == "running" and job.cancelled_at is not None


def can_cancel(job: ServiceJob) -> bool:
    return job.status not in ENDED and service_for(job).cancellable


def changed_at(job: ServiceJob) -> datetime:
    """Return when its status or its progress last changed."""
    moment: datetime = job.updated_at or job.created_at
    return moment


def address(name: str, job: ServiceJob) -> str | None:
    """Return an address of a job; None where the project has not included them."""
    try:
        return reverse(f"myxo_jobs:{name}", args=[str(job.uid)])
    except NoReverseMatch:
        return None


def file_of(job: ServiceJob) -> StoredFile | None:
    """Return the file of a done job: one that a run of it has written, no other."""
    if job.status != "done" or not isinstance(job.result, dict):
        return None
    name, storage, size = (job.result.get(key) for key in ("file", "storage", "file_bytes"))
    if not isinstance(name, str) or not isinstance(storage, str) or not isinstance(size, int):
        return None
    if folder_of_file(name, job.uid) is None:
        return None
    return StoredFile(storage, name, shown_name(job, posixpath.basename(name)), size)


def shown_name(job: ServiceJob, own_name: str = "") -> str:
    """Return what its owner knows the file of a job as. Cleaned, since SQL may have written it."""
    return clean_name(job.preferred_name or "") or clean_name(own_name) or "download"


def read_at(job: ServiceJob) -> datetime:
    """Return the moment a job was read, by the database's clock where the row tells it."""
    moment: datetime = getattr(job, "read_at", None) or timezone.now()
    return moment


def has_expired(job: ServiceJob) -> bool:
    """Tell whether a job is gone for its owner, whatever the sweep has done yet."""
    return job.status in ENDED and job.expires_at is not None and job.expires_at <= read_at(job)


def retry_after(job: ServiceJob) -> int | None:
    """Return in how many seconds to ask again; None when nothing will change."""
    if job.status in ENDED:
        return None
    age: timedelta = read_at(job) - job.created_at
    return int(min(max(age.total_seconds() / SHARE_OF_AGE, 1), MOST_SECONDS))


# -- its parts ---------------------------------------------------------------------


def _ahead(job: ServiceJob) -> int:
    from myxo_jobs import queue

    return queue.ahead_of(queue.alias(), job, MOST_AHEAD)


def _progress(job: ServiceJob) -> dict[str, Any]:
    """Return how far the newest attempt is; one that waits has none."""
    if job.status == "pending":
        return {"done": None, "total": None, "percent": None, "note": ""}
    done, total = job.progress_done, job.progress_total
    return {
        "done": _number(done),
        "total": _number(total),
        "percent": _percent(job.status, done, total),
        "note": job.progress_note or "",
    }


def _percent(status: str, done: float | None, total: float | None) -> int | None:
    """Return whole per cent: None where a bar would lie, 100 for a done job alone."""
    if total is None or done is None:
        return None
    if status == "done":
        return 100
    if total <= 0 or done > total:
        return None
    return min(math.floor(done / total * 100), 99)


def _number(value: float | None) -> float | int | None:
    return int(value) if value is not None and value.is_integer() else value


def _moment(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    if timezone.is_naive(moment):
        moment = timezone.make_aware(moment)
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"
