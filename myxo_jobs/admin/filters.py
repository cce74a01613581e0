"""The filters of the job list. Each leaves a condition that an index or one walk can meet."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.views.main import ERROR_FLAG, PAGE_VAR, ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from rangefilter.filters import DateRangeFilter

from myxo_jobs.admin import lookups
from myxo_jobs.models import Job

# By the columns, since the derived `status` has no index; `failed` has one.
STATUS_CONDITIONS = {
    Job.Status.PENDING.value: Q(failed=False, due__isnull=False, worker=""),
    Job.Status.RUNNING.value: Q(failed=False, due__isnull=False) & ~Q(worker=""),
    Job.Status.DONE.value: Q(failed=False, due__isnull=True),
    Job.Status.FAILED.value: Q(failed=True),
}

# How far the order of ids may differ from the order of puts: a statement that puts
# many jobs takes its ids while it runs, and a clock may be set back.
ID_SLACK = timedelta(hours=1)

# Beyond them a time zone can move a moment out of the years that Python knows.
FIRST_DATE, LAST_DATE = date(1000, 1, 1), date(9000, 1, 1)


class StatusFilter(admin.SimpleListFilter):
    title = _("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(Job.Status.choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        condition = STATUS_CONDITIONS.get(self.value() or "")
        return queryset.filter(condition) if condition else queryset


class TopicFilter(admin.SimpleListFilter):
    title = _("topic")
    parameter_name = "topic"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        chosen = self.value()
        names = set(lookups.topics()) | ({chosen} if chosen else set())
        return [(name, name) for name in sorted(names)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        topic = self.value()
        if topic is None:
            return queryset
        return queryset.none() if "\x00" in topic else queryset.filter(topic=topic)


class RangeFilter(DateRangeFilter):  # type: ignore[misc]
    """A range of dates, chosen in a plain form that keeps the other filters."""

    template = "admin/myxo_jobs/job/date_range_filter.html"

    def choices(self, changelist: ChangeList) -> Iterator[dict[str, Any]]:
        mine = (*self.expected_parameters(), PAGE_VAR, ERROR_FLAG)
        yield {
            "kept": [
                (name, value)
                for name, values in self.request.GET.lists()
                if name not in mine
                for value in values
            ],
            "is_used": any(self.used_parameters.values()),
            "query_string": changelist.get_query_string(remove=self.expected_parameters()),
        }

    def _get_form_fields(self) -> dict[str, forms.Field]:
        return {
            self.lookup_kwarg_gte: _date_field(_("From")),
            self.lookup_kwarg_lte: _date_field(_("To")),
        }

    def _make_query_filter(
        self, request: HttpRequest, validated_data: dict[str, date | None]
    ) -> dict[str, Any]:
        within = {
            name: value and min(max(value, FIRST_DATE), LAST_DATE)
            for name, value in validated_data.items()
        }
        conditions: dict[str, Any] = super()._make_query_filter(request, within)
        return conditions


class DueFilter(RangeFilter):
    def _get_default_title(self, *args: Any) -> Any:
        return _("date due")


class PutFilter(RangeFilter):
    """By the date of the put, which has no index: narrowed to a range of ids first."""

    def _get_default_title(self, *args: Any) -> Any:
        return _("date put")

    def _make_query_filter(
        self, request: HttpRequest, validated_data: dict[str, date | None]
    ) -> dict[str, Any]:
        conditions = super()._make_query_filter(request, validated_data)
        start = conditions.get("created_at__gte")
        end = conditions.get("created_at__lte")
        if start:
            conditions["pk__gte"] = lookups.first_id_put(start - ID_SLACK)
        if end:
            conditions["pk__lt"] = lookups.first_id_put(end + ID_SLACK)
        # No id: there is no job, and nothing to narrow.
        return {name: value for name, value in conditions.items() if value is not None}


def _date_field(label: Any) -> forms.DateField:
    # A date input sends 2026-01-31 whatever the language, and shows its own calendar.
    widget = forms.DateInput(format="%Y-%m-%d", attrs={"type": "date"})
    return forms.DateField(label=label, required=False, widget=widget)
