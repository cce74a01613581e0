"""The list of the reader's own jobs: newest first, page by page, by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec
from django.db.models import BooleanField, Case, Q, Value, When
from django.db.models.functions import Now
from django.urls import NoReverseMatch, reverse

from myxo_jobs.models import MomentField
from myxo_jobs.services.document import listed_document, service_for
from myxo_jobs.services.door import list_jobs
from myxo_jobs.services.rows import uid_of
from myxo_jobs.services.words import listed_words

if TYPE_CHECKING:
    from django.http import HttpRequest

PAGE_JOBS = 20


class ListedJob(msgspec.Struct, frozen=True):
    """One line of the list."""

    document: dict[str, Any]
    words: dict[str, str]


class Page(msgspec.Struct, frozen=True):
    """Some of the reader's jobs, and the address of those that come after, if any do."""

    jobs: list[ListedJob]
    next: str | None

    def document(self) -> dict[str, Any]:
        return {"jobs": [job.document for job in self.jobs], "next": self.next}


def page_of(request: HttpRequest, kind: str | None = None, before: str = "") -> Page:
    """Return the jobs of whoever asks, of one kind or of all; none for nobody."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return Page([], None)
    rows = list_jobs(kind, owner=user)
    if before_uid := uid_of(before):
        rows = rows.filter(uid__lt=before_uid)
    # Whether there is a file, without reading what may be a long result.
    has_file = Q(failed=False, due__isnull=True, result__contains='"file_bytes":')
    found = list(
        rows.annotate(
            read_at=Now(output_field=MomentField()),
            has_file=Case(
                When(has_file, then=Value(True)), default=False, output_field=BooleanField()
            ),
        )[: PAGE_JOBS + 1]
    )
    shown = [job for job in found[:PAGE_JOBS] if service_for(job).may_see(request, job)]
    last = str(found[PAGE_JOBS - 1].uid) if len(found) > PAGE_JOBS else None
    return Page([_listed(job) for job in shown], last and _next(kind, last))


def _listed(job: Any) -> ListedJob:
    document = listed_document(job, has_file=job.has_file)
    return ListedJob(document, listed_words(job, document))


def _next(kind: str | None, before: str) -> str | None:
    query = {"kind": kind, "before": before} if kind else {"before": before}
    try:
        return f"{reverse('myxo_jobs:list')}?{urlencode(query)}"
    except NoReverseMatch:
        return None
