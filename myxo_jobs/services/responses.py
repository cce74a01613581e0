"""Answers about a job: the status document or the page, and that there is nothing."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.core.serializers.json import DjangoJSONEncoder
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.utils.translation import gettext as _

from myxo_jobs.services.document import address, has_expired, job_document, retry_after

if TYPE_CHECKING:
    from myxo_jobs.services.rows import ServiceJob

R = TypeVar("R", bound=HttpResponseBase)

PRIVATE = "private, no-cache"
JSON, HTML = "application/json", "text/html"
# The script asks with this in the query: it wants the words of the page, too.
WITH_WORDS = "words"


def accepted(request: HttpRequest, uid: str) -> HttpResponseBase:
    """Answer an enqueue: 202 with the status document; to a browser, 303 to the status page."""
    from myxo_jobs.services.door import get_job

    job = get_job(uid)
    if job is None:
        raise Http404("there is no such job")
    place = address("job", job)
    if place is not None and wants_page(request):
        return see_other(place)
    response = document_response(job, status=202)
    if place is not None:
        response["Location"] = place
    return response


def status_response(request: HttpRequest, job: ServiceJob) -> HttpResponseBase:
    """Answer how a job stands: with the status document, or a page where that is preferred.

    404 for one that has expired. Whether the asker may see it was decided before.
    """
    if has_expired(job):
        return not_there(request, job)
    if wants_page(request):
        from myxo_jobs.services.words import part_of

        context = {"job": job, "part": part_of(job)}
        return _told(render(_plain(request), "myxo_jobs/services/job.html", context), job)
    response = document_response(job, with_words=WITH_WORDS in request.GET)
    answer = if_wanted(request, response, etag=response["ETag"])
    return answer if answer is response else _told(answer, job)


def document_response(
    job: ServiceJob, *, status: int = 200, with_words: bool = False
) -> HttpResponse:
    """Return the status document as a response."""
    document = job_document(job)
    if with_words:
        from myxo_jobs.services.words import words_of

        document["words"] = words_of(job, document)
    response = json_response(document, status=status)
    response["ETag"] = f'"{hashlib.sha256(response.content).hexdigest()[:32]}"'
    _told(response, job)
    return response


def json_response(document: Any, *, status: int = 200) -> HttpResponse:
    body = json.dumps(document, cls=DjangoJSONEncoder)
    headers = {"Cache-Control": PRIVATE, "X-Content-Type-Options": "nosniff"}
    response = HttpResponse(body, content_type=JSON, status=status, headers=headers)
    patch_vary_headers(response, ("Accept", "Cookie"))
    return response


def not_there(request: HttpRequest, job: ServiceJob | None = None) -> HttpResponseBase:
    """Answer 404; to whoever may see a job that has expired, saying so."""
    if job is None or not has_expired(job):
        if wants_page(request):
            raise Http404("there is no such job, or no such file")
        return json_response({"detail": _("Not found.")}, status=404)
    from myxo_jobs.services.words import gone_words

    words = gone_words(job)
    if wants_page(request):
        context = {"job": None, "part": None, "words": words}
        page = render(_plain(request), "myxo_jobs/services/job.html", context, status=404)
        page["Cache-Control"] = PRIVATE
        return page
    return json_response({"detail": words}, status=404)


def if_wanted(
    request: HttpRequest, response: R, *, etag: str, last_modified: int | None = None
) -> R:
    """Return a response, or 304 or 412 where the conditions of the request ask for that."""
    answer: Any = get_conditional_response(
        _plain(request),
        etag=etag,
        last_modified=last_modified,
        response=response,  # type: ignore[arg-type]
    )
    return cast("R", answer)


def see_other(place: str) -> HttpResponse:
    """Return a redirect that is followed by a GET, whatever was sent."""
    response = HttpResponseRedirect(place)
    response.status_code = 303
    return response


def wants_page(request: HttpRequest) -> bool:
    """Tell whether `Accept` prefers HTML to JSON; without a preference it is JSON."""
    return _plain(request).get_preferred_type([JSON, HTML]) == HTML


def _plain(request: HttpRequest) -> HttpRequest:
    """Return Django's request, which REST framework wraps into one of its own."""
    plain: HttpRequest = getattr(request, "_request", request)
    return plain


def _told(response: HttpResponse, job: ServiceJob) -> HttpResponse:
    """Add how long to wait before asking again, and that nobody else may keep the answer."""
    response["Cache-Control"] = PRIVATE
    patch_vary_headers(response, ("Accept", "Cookie"))
    wait = retry_after(job)
    if wait is not None:
        response["Retry-After"] = str(wait)
    return response
