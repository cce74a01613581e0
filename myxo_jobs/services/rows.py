"""`ServiceJob`: the row of a kept job as services and their owners see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from django.apps import apps
from django.urls import reverse
from django.utils import timezone, translation
from django.utils.translation import gettext_lazy as _

from myxo_jobs.conf import settings
from myxo_jobs.errors import PayloadInvalid
from myxo_jobs.handlers import Run, registry
from myxo_jobs.models import Job
from myxo_jobs.services.files import AttemptFiles, JobFile

T = TypeVar("T")


class ServiceJob(Job):
    """A kept job: its row, payload and result decoded; in `process`, with the run it is in."""

    # Decoded: of the service's `payload_type`, or what JSON has.
    payload: Any
    result: Any

    _run: Run | None = None
    _files: AttemptFiles | None = None

    class Meta:
        proxy = True
        # The permissions of `Job` are those of all jobs.
        default_permissions = ()
        verbose_name = _("service job")
        verbose_name_plural = _("service jobs")

    @classmethod
    def from_db(cls, db: str | None, field_names: Any, values: Any, **kwargs: Any) -> ServiceJob:
        row = super().from_db(db, field_names, values, **kwargs)
        loaded = row.__dict__
        if "payload" in loaded and "topic" in loaded:
            loaded["payload"] = _decoded_payload(loaded["topic"], loaded["payload"])
        elif "payload" in loaded:
            del loaded["payload"]  # read when it is asked for, with the topic
        if loaded.get("result") is not None:
            loaded["result"] = msgspec.json.decode(loaded["result"])
        return row

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Read again, or what was deferred: a payload with the topic, by which it is decoded."""
        if fields is not None and "payload" in fields:
            fields = [*fields, "topic"]
        super().refresh_from_db(using, fields, from_queryset)

    def save(self, *args: Any, update_fields: Iterable[str] | None = None, **kwargs: Any) -> None:
        """Save what has the form of its column. Raises TypeError for payload and result."""
        if update_fields is None or {"payload", "result"} & set(update_fields):
            raise TypeError("payload and result are decoded here: save update_fields without them")
        super().save(*args, update_fields=update_fields, **kwargs)

    # -- of the run, in `process` alone ------------------------------------------

    @property
    def run(self) -> Run:
        """The run that `process` is called for."""
        if self._run is None:
            raise RuntimeError("only the job that process(job) was given is running here")
        return self._run

    @property
    def should_stop(self) -> bool:
        """Whether to stop early: the worker drains, or the job was cancelled."""
        return self.run.should_stop

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled the job."""
        if self._run is None:
            if self.status == "failed":
                return bool(self.reason == "cancelled")
            # What an earlier life has left on a job that waits again means nothing.
            return self.status == "running" and self.cancelled_at is not None
        return self._run.cancelled

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Note how far the run is: see `Run.progress`."""
        self.run.progress(done, total, note)

    def track(self, items: Iterable[T], total: float | None = None) -> Iterator[T]:
        """Yield the items and note after each how many there were: see `Run.track`."""
        return self.run.track(items, total)

    def extend(self, seconds: float | timedelta) -> None:
        """Make the claim last at least so long from now: see `Run.extend`."""
        self.run.extend(seconds)

    def file(self, name: str, *, text: bool = False) -> JobFile:
        """Open a file of this attempt for a `with` block, at whose end it is stored."""
        if self._files is None:
            raise RuntimeError("only the job that process(job) was given can write files")
        return self._files.file(name, text=text)

    # -- of the row --------------------------------------------------------------

    @property
    def attempt(self) -> int:
        return self.attempts

    @property
    def max_attempts(self) -> int | None:
        handler = registry.of_topic(self.topic)
        return handler.attempts if handler else None

    @property
    def url(self) -> str:
        """The address of its status page, absolute where it is known what the site is called."""
        return _site() + reverse("myxo_jobs:job", args=[str(self.uid)])


def _site() -> str:
    if settings().base_url:
        return settings().base_url.rstrip("/")
    if apps.is_installed("django.contrib.sites"):
        from django.contrib.sites.models import Site

        return f"https://{Site.objects.get_current().domain}"
    return ""


def _decoded_payload(topic: str, payload: str) -> Any:
    """Return a payload as its handler gets it; plainly, or as it is, where that fails."""
    handler = registry.of_topic(topic)
    try:
        if handler is not None:
            return handler.codec.decode(payload)
    except PayloadInvalid:
        pass
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return payload


def uid_of(uid: object) -> UUID | None:
    """Return a uid as the column has it; None for what is none."""
    if isinstance(uid, UUID):
        return uid
    try:
        found = UUID(uid) if isinstance(uid, str) else None
    except ValueError:
        return None
    return found if found and str(found) == str(uid).lower() else None


def as_service_job(row: Job) -> ServiceJob:
    """Return the row of a job as services see it."""
    if isinstance(row, ServiceJob):
        return row
    loaded = [field.attname for field in Job._meta.concrete_fields if field.attname in vars(row)]
    return ServiceJob.from_db(row._state.db, loaded, [vars(row)[name] for name in loaded])


@contextmanager
def speaking(job: Job) -> Iterator[None]:
    """Work in the language and the time zone that were active when the job was put."""
    with ExitStack() as stack:
        if job.language:
            stack.enter_context(translation.override(job.language))
        zone = zone_of(job.time_zone)
        if zone is not None:
            stack.enter_context(timezone.override(zone))
        yield


def zone_of(name: str | None) -> ZoneInfo | None:
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None
