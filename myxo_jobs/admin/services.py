"""The services: what their dials stand at, and what their jobs come to."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.formats import number_format
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from myxo_jobs import queue
from myxo_jobs.handlers import Dials
from myxo_jobs.models import ServiceSettings
from myxo_jobs.services import service_stats
from myxo_jobs.services.dials import dials_of
from myxo_jobs.services.service import services

DAYS = 30
DIALS = ("retention_seconds", "max_concurrent", "job_timeout_seconds")


class ServiceSettingsForm(forms.ModelForm):  # type: ignore[type-arg]
    """The dials of one service; a new one chooses among those that have none yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "kind" in self.fields:
            taken = set(ServiceSettings.objects.values_list("kind", flat=True))
            kinds = sorted(one.kind for one in services if one.kind not in taken)
            self.fields["kind"] = forms.ChoiceField(
                label=_("kind"), choices=[(kind, kind) for kind in kinds]
            )


class ServiceSettingsAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    form = ServiceSettingsForm
    ordering = ("kind",)
    list_display = ("kind", "title_shown", "retention_shown", "most_shown", "longest_shown")
    fieldsets = (
        (None, {"fields": ("kind", "title_shown")}),
        (
            _("Dials"),
            {
                "fields": DIALS,
                "description": _(
                    "An empty field leaves the word to the setting and the code. Workers take a "
                    "change up within seconds; 0 at once pauses the kind."
                ),
            },
        ),
        (
            _("Now"),
            {"fields": ("retention_shown", "most_shown", "longest_shown", "card")},
        ),
    )
    readonly_fields = ("title_shown", "retention_shown", "most_shown", "longest_shown", "card")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return ("kind", *self.readonly_fields) if obj is not None else self.readonly_fields

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.fieldsets if obj is not None else ((None, {"fields": ("kind", *DIALS)}),)

    @admin.display(description=_("title"), empty_value="–")
    def title_shown(self, row: ServiceSettings) -> str | None:
        service = services.get(row.kind)
        return service.shown_title if service else None

    @admin.display(description=_("keeps jobs for"), empty_value="–")
    def retention_shown(self, row: ServiceSettings) -> str | None:
        dials = _dials(row)
        return None if dials is None else _seconds(dials.keep)

    @admin.display(description=_("most at once"), empty_value="–")
    def most_shown(self, row: ServiceSettings) -> int | None:
        dials = _dials(row)
        return None if dials is None else dials.limit

    @admin.display(description=_("longest run"), empty_value="–")
    def longest_shown(self, row: ServiceSettings) -> str | None:
        dials = _dials(row)
        return None if dials is None else _seconds(dials.timeout)

    @admin.display(description=_("jobs of the last 30 days"), empty_value="–")
    def card(self, row: ServiceSettings) -> SafeString | None:
        if services.get(row.kind) is None:
            return None
        stats = service_stats(row.kind, DAYS)
        shown = [
            (_("waiting"), stats["pending"]),
            (_("running"), stats["running"]),
            (_("done"), stats["done"]),
            (_("failed"), stats["failed"]),
            (_("items"), number_format(stats["items"], force_grouping=True)),
            (_("bytes in"), filesizeformat(stats["bytes_in"])),
            (_("bytes out"), filesizeformat(stats["bytes_out"])),
            (_("mean run"), _seconds(stats["mean_seconds"])),
            (_("95 % of runs within"), _seconds(stats["p95_seconds"])),
            (_("space held"), filesizeformat(stats["space_held"])),
        ]
        return format_html_join("", "<div>{}: {}</div>", shown)


def _dials(row: ServiceSettings) -> Dials | None:
    return None if services.get(row.kind) is None else dials_of(row.kind, queue.alias())


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{number_format(seconds, 3 if seconds % 1 else 0, force_grouping=True)} s"
