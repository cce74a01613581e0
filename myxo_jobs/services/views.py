"""The views behind the addresses: each finds a job that the asker may see, or answers 404."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from myxo_jobs import queue
from myxo_jobs.models import MomentField
from myxo_jobs.services.document import address, can_cancel, has_expired, service_for
from myxo_jobs.services.door import delete_job
from myxo_jobs.services.download import file_response
from myxo_jobs.services.listing import page_of
from myxo_jobs.services.responses import (
    PRIVATE,
    document_response,
    json_response,
    not_there,
    see_other,
    status_response,
    wants_page,
)
from myxo_jobs.services.rows import ServiceJob, uid_of

# What no answer tells: the request, and what is the operator's.
NOT_TOLD = ("payload", "error", "traceback", "attempt_log", "again")


def find(request: HttpRequest, uid: str) -> ServiceJob | None:
    """Return a job that the asker may see, in one query; None for any other."""
    # Asked of everybody, so that an answer for no job varies with the same as any other.
    user = getattr(request, "user", None)
    _ = user is not None and user.is_authenticated
    found = uid_of(uid)
    rows = ServiceJob.objects.filter(uid=found).defer(*NOT_TOLD)
    job = found and rows.annotate(read_at=Now(output_field=MomentField())).first()
    return job if job and service_for(job).may_see(request, job) else None


def of_a_job(
    view: Callable[[HttpRequest, ServiceJob], HttpResponseBase],
) -> Callable[[HttpRequest, str], HttpResponseBase]:
    """Give a view the job that its address names; answer 404 where the asker may see none."""

    @wraps(view)
    def with_job(request: HttpRequest, uid: str) -> HttpResponseBase:
        found = find(request, uid)
        if found is None or has_expired(found):
            return not_there(request, found)
        return view(request, found)

    return with_job


@require_safe
def jobs(request: HttpRequest) -> HttpResponseBase:
    page = page_of(request, request.GET.get("kind") or None, request.GET.get("before", ""))
    if not wants_page(request):
        return json_response(page.document())
    response = render(request, "myxo_jobs/services/jobs.html", {"page": page})
    response["Cache-Control"] = PRIVATE
    return response


@require_safe
@of_a_job
def job(request: HttpRequest, job: ServiceJob) -> HttpResponseBase:
    return status_response(request, job)


@require_safe
@of_a_job
def download(request: HttpRequest, job: ServiceJob) -> HttpResponseBase:
    return file_response(request, job)


@require_POST
@of_a_job
def cancel(request: HttpRequest, job: ServiceJob) -> HttpResponseBase:
    stops = queue.cancel(queue.alias(), job.pk)
    return _how_it_stands(request, job, status=200 if stops else 409)


@require_POST
@of_a_job
def delete(request: HttpRequest, job: ServiceJob) -> HttpResponseBase:
    if not delete_job(job.uid):
        return _how_it_stands(request, job, status=202 if can_cancel(job) else 409)
    if wants_page(request):
        return see_other(reverse("myxo_jobs:list"))
    return HttpResponse(status=204)


def _how_it_stands(request: HttpRequest, job: ServiceJob, *, status: int) -> HttpResponseBase:
    """Answer a change: with the status document; to a form, with the way to the page."""
    place = address("job", job)
    if place is not None and wants_page(request):
        return see_other(place)
    now = find(request, str(job.uid))
    return not_there(request) if now is None else document_response(now, status=status)
