"""`{% load myxo_jobs %}`: a bar for one job, and the list of the reader's own."""

from __future__ import annotations

from typing import Any

from django import template
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.template import Context

from myxo_jobs.services.document import has_expired
from myxo_jobs.services.listing import page_of
from myxo_jobs.services.views import find
from myxo_jobs.services.words import part_of

register = template.Library()

# What a template of ours needs of the page it stands in.
PASSED_ON = ("csrf_token", "csp_nonce", "request")


@register.inclusion_tag("myxo_jobs/services/progress.html", takes_context=True)
def job_progress(context: Context, uid: object, then: str = "") -> dict[str, Any]:
    """Show how a job stands and follow it; go to `then`, on the same site, when it is done."""
    request = _request(context)
    job = find(request, str(uid))
    host = request.get_host() if then else None
    shown = None if job is None or has_expired(job) else part_of(job, then, host)
    return {**_passed_on(context), "part": shown}


@register.inclusion_tag("myxo_jobs/services/list.html", takes_context=True)
def job_list(context: Context, kind: str | None = None) -> dict[str, Any]:
    """Show the newest jobs of whoever reads the page, of one kind."""
    return {**_passed_on(context), "page": page_of(_request(context), kind)}


def _request(context: Context) -> HttpRequest:
    request = context.get("request")
    if not isinstance(request, HttpRequest):
        raise ImproperlyConfigured(
            "the tags of myxo_jobs need `request` in the template: render it with the request, "
            "and the context processor django.template.context_processors.request"
        )
    return request


def _passed_on(context: Context) -> dict[str, Any]:
    return {name: context[name] for name in PASSED_ON if name in context}
