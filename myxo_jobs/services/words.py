"""The words of the page: how a job stands, said to its owner in their language."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from django.template.defaultfilters import filesizeformat
from django.utils import formats, timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from myxo_jobs.services.document import (
    ENDED,
    MOST_AHEAD,
    address,
    changed_at,
    job_document,
    read_at,
    retry_after,
    shown_name,
)

if TYPE_CHECKING:
    from datetime import datetime

    from myxo_jobs.services.rows import ServiceJob

# A run that changed nothing for so long is said to be silent.
NO_NEWS = timedelta(minutes=2)
SOON = timedelta(hours=24)
FAR = timedelta(days=300)
# How often a page without JavaScript is loaded again, at least.
REFRESH_SECONDS = 3
ORDINALS = {
    2: gettext_lazy("second"),
    3: gettext_lazy("third"),
    4: gettext_lazy("fourth"),
    5: gettext_lazy("fifth"),
}
CARDINALS = {
    2: gettext_lazy("two"),
    3: gettext_lazy("three"),
    4: gettext_lazy("four"),
    5: gettext_lazy("five"),
}


class Part(msgspec.Struct, frozen=True):
    """What the template of one bar shows."""

    document: dict[str, Any]
    words: dict[str, str]
    # Of the status document with words; None where the addresses are not included.
    address: str | None
    value: int | None
    wait: int | None
    refresh: int
    then: str
    page: str | None
    has_ended: bool
    can_cancel: bool


def part_of(job: ServiceJob, then: str = "", host: str | None = None) -> Part:
    """Return what is shown of a job; `then`: where to go when it is done, on the same site."""
    document = job_document(job)
    page = address("job", job)
    wait = retry_after(job)
    return Part(
        document=document,
        words=words_of(job, document),
        address=page and f"{page}?words",
        value=document["progress"]["percent"],
        wait=wait,
        refresh=max(wait or 0, REFRESH_SECONDS),
        then=then if url_has_allowed_host_and_scheme(then, host) else "",
        page=page,
        has_ended=job.status in ENDED,
        can_cancel=bool(document["cancel_url"]) and not document["cancelling"],
    )


def words_of(job: ServiceJob, document: dict[str, Any]) -> dict[str, str]:
    """Return the sentences about a job: its state, and what to know about its file."""
    from myxo_jobs.services.rows import speaking

    with speaking(job):
        kept = _until(job) if document["status"] == "done" else ""
        size = filesizeformat(document["file"]["bytes"]) if document["file"] else ""
        return {
            "state": _state(job, document),
            "file": document["file"]["name"] if document["file"] else "",
            "about": ", ".join(filter(None, (size, kept))),
        }


def listed_words(job: ServiceJob, document: dict[str, Any]) -> dict[str, str]:
    """Return the sentences about a job in a list."""
    from myxo_jobs.services.rows import speaking

    with speaking(job):
        return {
            "created": formats.date_format(_local(job.created_at), "DATETIME_FORMAT"),
            "state": _state(job, document),
            "file": shown_name(job, _("download")) if document["download_url"] else "",
            "about": _until(job) if document["download_url"] else "",
        }


def gone_words(job: ServiceJob) -> str:
    """Return the sentence for the owner of a job that has expired."""
    from myxo_jobs.services.rows import speaking

    with speaking(job):
        moment = _local(job.expires_at or read_at(job))
        words = _("It has expired: it was kept until %(moment)s.")
        return words % {"moment": formats.date_format(moment, "DATETIME_FORMAT")}


# -- states ------------------------------------------------------------------------


def _state(job: ServiceJob, document: dict[str, Any]) -> str:
    if document["status"] == "done":
        return _("Done")
    if document["status"] == "failed":
        if document["reason"] == "cancelled":
            return _("Cancelled")
        return document["message"] or _("It did not work.")
    if document["cancelling"]:
        return _("Stopping")
    said = _waiting(document) if document["status"] == "pending" else _running(job, document)
    return capfirst(", ".join(said))


def _waiting(document: dict[str, Any]) -> list[str]:
    said = [_("waiting")]
    ahead = document.get("ahead")  # a list does not count
    if ahead == MOST_AHEAD:
        said.append(_("at least %(count)s before you") % {"count": _number(MOST_AHEAD)})
    elif ahead:
        words = ngettext("%(count)s before you", "%(count)s before you", ahead)
        said.append(words % {"count": _number(ahead)})
    if document["attempt"]:
        said += _attempt(document["attempt"] + 1, document["max_attempts"])
    return said


def _running(job: ServiceJob, document: dict[str, Any]) -> list[str]:
    progress = document["progress"]
    said = [progress["note"] or _("running")]
    if progress["total"] is not None:
        numbers = {"done": _number(progress["done"] or 0), "total": _number(progress["total"])}
        said.append(_("%(done)s of %(total)s") % numbers)
    elif progress["done"] is not None:
        said.append(_number(progress["done"]))
    silent = read_at(job) - changed_at(job)
    if silent >= NO_NEWS:
        minutes = int(silent.total_seconds() // 60)
        words = ngettext("no news for %(count)s min", "no news for %(count)s min", minutes)
        said.append(words % {"count": _number(minutes)})
    if document["attempt"] > 1:
        said += _attempt(document["attempt"], document["max_attempts"])
    return said


def _attempt(number: int, most: int | None) -> list[str]:
    if most is None:
        return []
    if number in ORDINALS and most in CARDINALS:
        words = {"nth": ORDINALS[number], "most": CARDINALS[most]}
        return [_("%(nth)s attempt of %(most)s") % words]
    return [_("attempt %(number)s of %(most)s") % {"number": number, "most": most}]


def _until(job: ServiceJob) -> str:
    if job.expires_at is None:
        return ""
    moment, left = _local(job.expires_at), job.expires_at - read_at(job)
    form = "TIME_FORMAT" if left < SOON else "MONTH_DAY_FORMAT" if left < FAR else "DATE_FORMAT"
    return _("until %(moment)s") % {"moment": formats.date_format(moment, form)}


def _local(moment: datetime) -> datetime:
    return timezone.localtime(moment) if timezone.is_aware(moment) else moment


def _number(value: float) -> str:
    if isinstance(value, float):
        value = round(value, 2)
    return str(formats.number_format(value, force_grouping=True))
