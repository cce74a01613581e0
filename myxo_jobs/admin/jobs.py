"""The list of jobs, one job, and what a person may do: retry and discard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from typing import Any

import msgspec
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Left
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.timesince import timesince
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from myxo_jobs import queue
from myxo_jobs.admin.filters import DueFilter, PutFilter, StatusFilter, TopicFilter
from myxo_jobs.admin.lookups import COUNTED_ROWS, CappedPaginator
from myxo_jobs.handlers import registry
from myxo_jobs.models import LONG_COLUMNS, Job

CHUNK_ROWS = 1_000
ERROR_CHARACTERS = 120
NAMED_JOBS = 20
BIGINT_DIGITS = 18


class JobChangeList(ChangeList):
    """The list without what is long: payloads, results, and all but the start of errors."""

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Job]:
        rows: QuerySet[Job] = super().get_queryset(request, *args, **kwargs)
        return rows.defer(*LONG_COLUMNS, "message").annotate(
            error_start=Left("error", ERROR_CHARACTERS + 1)
        )


class JobAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    # Ordered by id alone, which has an index and rises with the moment of the put.
    ordering = ("-id",)
    list_display = (
        "number",
        "status_shown",
        "topic_shown",
        "key_shown",
        "when",
        "attempts_shown",
        "error_line",
        "put",
    )
    list_filter = (
        StatusFilter,
        TopicFilter,
        ("created_at", PutFilter),
        ("due", DueFilter),
    )
    search_fields = ("id", "key")  # exactly: see get_search_results
    search_help_text = _("A job’s number or its key, exactly as it is.")
    actions = ("retry", "discard")
    paginator = CappedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each would count the table
    fieldsets = (
        (None, {"fields": ("state", "topic", "key", "priority", "attempts_shown")}),
        (_("Last failed attempt"), {"fields": ("error_shown", "traceback_shown")}),
        (_("Request"), {"fields": ("payload_shown",)}),
        (_("Moments"), {"fields": ("created_at", "due", "started_at", "lease_until")}),
    )
    readonly_fields = (
        *("state", "topic", "key", "priority", "attempts_shown"),
        *("created_at", "due", "started_at", "lease_until"),
        *("payload_shown", "error_shown", "traceback_shown"),
    )

    class Media:
        css = {"all": ("myxo_jobs/admin.css",)}

    # -- who may what ------------------------------------------------------------
    # A job is put by code and changed by its life: nobody has a form for it. Those who
    # may change jobs retry them, those who may delete jobs discard them.

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        return False

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return super().has_change_permission(request)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return super().has_delete_permission(request)

    # -- the list ----------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return JobChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        if not search_term:
            return queryset, False
        # The condition is that of the unique index; the ids it finds then have theirs.
        with_key = Job.objects.filter(key=search_term, key__isnull=False, due__isnull=False)
        ids = list(with_key.values_list("pk", flat=True))
        number = search_term.strip()
        if number.isascii() and number.isdigit() and len(number) <= BIGINT_DIGITS:
            ids.append(int(number))
        return queryset.filter(pk__in=ids), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        asked = set(request.POST.getlist("action")) - {""}
        if not asked <= self.get_actions(request).keys():
            raise PermissionDenied
        return super().changelist_view(request, extra_context)

    @admin.display(description=_("job"), ordering="id")
    def number(self, job: Job) -> str:
        return str(job.pk)

    @admin.display(description=_("status"))
    def status_shown(self, job: Job) -> str:
        label = Job.Status(job.status).label
        return format_html('<span class="myxo-status myxo-{}">{}</span>', job.status, label)

    @admin.display(description=_("topic"))
    def topic_shown(self, job: Job) -> str:
        return job.topic

    @admin.display(description=_("key"))
    def key_shown(self, job: Job) -> str | None:
        return job.key

    @admin.display(description=_("due"))
    def when(self, job: Job) -> str | None:
        now = timezone.now()
        if job.status == Job.Status.FAILED:
            return job.started_at and _time(job.started_at, _("last run {} ago"), now)
        if job.status == Job.Status.RUNNING:
            return job.started_at and _time(job.started_at, _("claimed {} ago"), now)
        if job.due is None:
            return None
        return _time(job.due, _("in {}") if job.due > now else _("waits for {}"), now)

    @admin.display(description=_("attempts"))
    def attempts_shown(self, job: Job) -> str:
        handler = registry.of_topic(job.topic)
        if handler is None:
            return str(job.attempts)
        return gettext("%(count)d of %(most)d") % {"count": job.attempts, "most": handler.attempts}

    @admin.display(description=_("last error"))
    def error_line(self, job: Job) -> str:
        start: str = job.error_start  # type: ignore[attr-defined]
        line = start.partition("\n")[0]
        return Truncator(line).chars(ERROR_CHARACTERS)

    @admin.display(description=_("put"), ordering="id")
    def put(self, job: Job) -> str:
        return _time(job.created_at, _("{} ago"), timezone.now())

    # -- one job -----------------------------------------------------------------

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        job = context["original"]
        context["can_retry"] = job.failed and self.has_retry_permission(request)
        context["can_discard"] = self.has_discard_permission(request)
        context["action_checkbox_name"] = ACTION_CHECKBOX_NAME
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description=_("status"))
    def state(self, job: Job) -> str:
        return format_html("{} {}", self.status_shown(job), _reason(job))

    @admin.display(description=_("payload"))
    def payload_shown(self, job: Job) -> str:
        return _preformatted(_indented(job.payload))

    @admin.display(description=_("error"), empty_value="–")
    def error_shown(self, job: Job) -> str:
        return _preformatted(job.error)

    @admin.display(description=_("traceback"), empty_value="–")
    def traceback_shown(self, job: Job) -> str:
        return _preformatted(job.traceback)

    # -- what a person may do ----------------------------------------------------

    @admin.action(permissions=["retry"], description=_("Retry selected jobs"))
    def retry(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        asked, done = self._act(
            request, queryset.filter(failed=True), queue.retry_failed, CHANGE, gettext("Retried.")
        )
        words = ngettext("Retried %(count)d job", "Retried %(count)d jobs", done)
        others = ngettext("%(count)d was not failed", "%(count)d were not failed", asked - done)
        self._tell(request, words, done, others, asked - done)

    @admin.action(permissions=["discard"], description=_("Discard selected jobs"))
    def discard(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        if "post" not in request.POST:
            return self._ask_before_discard(request, queryset)
        asked, done = self._act(request, queryset, queue.discard, DELETION, gettext("Discarded."))
        words = ngettext("Discarded %(count)d job", "Discarded %(count)d jobs", done)
        others = ngettext("%(count)d was gone already", "%(count)d were gone already", asked - done)
        self._tell(request, words, done, others, asked - done)
        return None

    def _act(
        self,
        request: HttpRequest,
        rows: QuerySet[Job],
        change: Callable[[str, Collection[int]], set[int]],
        flag: int,
        message: str,
    ) -> tuple[int, int]:
        """Change the selected jobs and log it; return how many were asked for and changed."""
        alias = queue.alias()
        found = done = 0
        for topics in _in_chunks(rows):
            with transaction.atomic(using=alias):
                changed = change(alias, topics.keys())
                jobs = [Job(pk=job_id, topic=topics[job_id]) for job_id in sorted(changed)]
                if jobs:
                    LogEntry.objects.log_actions(request.user.pk, jobs, flag, message)  # type: ignore[arg-type]
            found += len(topics)
            done += len(changed)
        if _is_across(request):
            return found, done
        return len(set(request.POST.getlist(ACTION_CHECKBOX_NAME))), done

    def _tell(
        self, request: HttpRequest, words: str, count: int, others: str, other_count: int
    ) -> None:
        parts = [words % {"count": count}]
        if other_count:
            parts.append(others % {"count": other_count})
        level = messages.SUCCESS if count else messages.WARNING
        self.message_user(request, "; ".join(parts) + ".", level)

    def _ask_before_discard(self, request: HttpRequest, rows: QuerySet[Job]) -> HttpResponse:
        pages = CappedPaginator(rows, NAMED_JOBS)
        count = f"{COUNTED_ROWS:,}+" if pages.is_capped else str(pages.count)
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": _("Discard jobs?"),
            "count": count,
            "jobs": pages.page(1).object_list,
            "others": pages.count > NAMED_JOBS,
            "media": self.media,
            "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "select_across": int(_is_across(request)),
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/myxo_jobs/job/discard_confirmation.html", context)


def _in_chunks(rows: QuerySet[Job]) -> Iterator[dict[int, str]]:
    """Yield the ids and topics of jobs, at most 1,000 at a time; none that is put meanwhile."""
    newest = Job.objects.order_by("-pk").values_list("pk", flat=True).first()
    if newest is None:
        return
    rest = rows.filter(pk__lte=newest).order_by("pk").values_list("pk", "topic")
    while chunk := dict(rest[:CHUNK_ROWS]):
        yield chunk
        rest = rest.filter(pk__gt=max(chunk))


def _is_across(request: HttpRequest) -> bool:
    """Tell whether all jobs of the list were selected, on every page of it."""
    return request.POST.get("select_across") == "1"


def _reason(job: Job) -> str:
    """Say in words why a job has the status it has."""
    now = timezone.now()
    if job.failed:
        return ngettext(
            "after %(count)d attempt. It stays until somebody retries or discards it.",
            "after %(count)d attempts. It stays until somebody retries or discards it.",
            job.attempts,
        ) % {"count": job.attempts}
    if job.due is None:
        return gettext("It is done.")
    if job.worker:
        return _reason_of_running(job, now)
    if job.due > now:
        return gettext("It is due in %(span)s.") % {"span": _span(job.due, now)}
    if registry.of_topic(job.topic) is None:
        return gettext("It is due, but this site knows no handler for its topic.")
    return gettext("It has been due for %(span)s and waits for a worker.") % {
        "span": _span(job.due, now)
    }


def _reason_of_running(job: Job, now: datetime) -> str:
    if job.lease_until and job.lease_until <= now:
        return gettext(
            "Its worker has not renewed its claim for %(span)s: the next free worker takes it."
        ) % {"span": _span(job.lease_until, now)}
    return gettext("A worker has claimed it.")


def _span(moment: datetime, now: datetime) -> str:
    """Say how far a moment and now are apart."""
    start, end = min(moment, now), max(moment, now)
    seconds = int((end - start).total_seconds())
    if seconds < 60:
        return ngettext("%(count)d second", "%(count)d seconds", seconds) % {"count": seconds}
    return timesince(start, end, depth=1)


def _time(moment: datetime, words: Any, now: datetime) -> str:
    """Return a moment in relative words, with the date and its zone on hover."""
    if timezone.is_aware(moment):
        moment, now = timezone.localtime(moment), timezone.localtime(now)
    exact = f"{date_format(moment, 'DATETIME_FORMAT')} {moment.tzname() or ''}".strip()
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        moment.isoformat(),
        exact,
        format_html(words, _span(moment, now)),
    )


def _indented(payload: str) -> str:
    """Return JSON on several lines, each value as it is stored; any other text as it is."""
    try:
        return msgspec.json.format(payload, indent=2)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return payload


def _preformatted(text: str) -> str:
    return format_html('<pre class="myxo-text">{}</pre>', text) if text else "–"
