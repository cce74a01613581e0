"""The functions of services: put a job, find it, end it."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from django.db import connections
from django.utils import timezone, translation
from django.utils.functional import Promise

from myxo_jobs.errors import PayloadInvalid, seconds_of
from myxo_jobs.handlers import Handler, registry
from myxo_jobs.payloads import (
    KEY_CHARACTERS,
    JsonCodec,
    check_key,
    unknown_fields,
    unknown_names,
)
from myxo_jobs.services.names import clean_name
from myxo_jobs.services.service import handler_of, owner_of, service_of, services

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from myxo_jobs.services.rows import ServiceJob

# As in `jobs`, the rooms that need the models are imported by the calls that use them.

COLUMN_CHARACTERS = 255
LANGUAGE = re.compile(r"[A-Za-z0-9_@-]{1,35}")
ZONE_CHARACTERS = 64
STATUSES = ("pending", "running", "done", "failed")
MOST_DAYS = 36_500
# The end of a result tells of the job's file. A result may have 1 MiB: it is not read for that.
RESULT_END_CHARACTERS = 2_000
_TEXT = r'"(?:[^"\\]|\\.)*"'
TOLD_FILE = re.compile(
    rf'"file":{_TEXT},"storage":{_TEXT},"file_bytes":(\d{{1,18}})\}}\Z', re.ASCII
)


# -- put ---------------------------------------------------------------------------


def enqueue(
    kind: str,
    payload: Any,
    owner_kind: str = "",
    owner_id: str = "",
    preferred_name: str = "",
    *,
    owner: Any = None,
    key: str | None = None,
    delay: float | timedelta | None = None,
    language: str | None = None,
    time_zone: str | None = None,
) -> str:
    """Put a pending job in the caller's transaction; return its uid, valid at once.

    `owner` is a user or any other saved model instance; `owner_kind` and `owner_id` name one
    otherwise. With `key`, while a job of that kind, owner and key is pending or running, its
    uid is returned and nothing is put. `delay` as in `Jobs.put`. `language` and `time_zone`
    are the active ones unless given.

    Raises KindUnknown; PayloadInvalid or PayloadTypeInvalid, naming the field; ValueError or
    TypeError for the other arguments; all before any SQL.
    """
    from myxo_jobs import queue
    from myxo_jobs.databases import KeptColumns, Row

    service = service_of(kind)
    handler = handler_of(service)
    owner_kind, owner_id = _owner(owner_kind, owner_id, owner)
    language = _language(language)
    columns = KeptColumns(
        uid=str(queue.uuid7()),
        owner_kind=owner_kind or None,
        owner_id=owner_id or None,
        preferred_name=_name(preferred_name, language),
        language=language,
        time_zone=_zone(time_zone),
    )
    row = Row(
        topic=kind,
        payload=handler.codec.encode(_payload(handler, payload)),
        key=None if key is None else _key(kind, owner_kind, owner_id, key),
        priority=handler.priority,
    )
    due = None if delay is None else seconds_of(delay, "delay") or None
    return queue.enqueue(connections[queue.alias()], row, columns, due=due)


def _payload(handler: Handler, payload: Any) -> Any:
    """Return a payload as its Struct, if the service has one and was given a dict."""
    struct = handler.request
    if struct is msgspec.Struct or isinstance(payload, struct) or not isinstance(payload, dict):
        return _checked_type(struct, payload)
    for name in unknown_names(payload, struct):
        raise PayloadInvalid(f"{struct.__name__}: it has no field {name!r}")
    try:
        converted = msgspec.convert(payload, struct)
    except msgspec.ValidationError as error:
        with suppress(PayloadInvalid):
            # Of what JSON cannot hold it says so: a PayloadTypeInvalid, that goes on.
            JsonCodec(struct.__name__).encode(payload)
        raise PayloadInvalid(f"{struct.__name__}: {error}") from error
    for path, name in unknown_fields(payload, converted):
        raise PayloadInvalid(f"{struct.__name__}: at {path}: it has no field {name!r}")
    return converted


def _checked_type(struct: type[msgspec.Struct], payload: Any) -> Any:
    if struct is not msgspec.Struct and type(payload) is not struct:
        raise PayloadInvalid(
            f"payload takes a {struct.__name__} or a dict of its fields, "
            f"not a {type(payload).__name__}"
        )
    return payload


def _name(preferred_name: Any, language: str | None) -> str | None:
    """Return what a file is to be called; a lazy translation in the language of the job."""
    if isinstance(preferred_name, Promise):
        with translation.override(language) if language else nullcontext():
            preferred_name = str(preferred_name)
    return clean_name(_text(preferred_name, "preferred_name")) or None


def _owner(owner_kind: Any, owner_id: Any, owner: Any) -> tuple[str, str]:
    if owner is not None:
        if owner_kind or owner_id not in ("", None):
            raise ValueError("owner and owner_kind or owner_id are two answers: give one of them")
        return owner_of(owner)
    owner_id = "" if owner_id is None else str(owner_id)
    owner_kind, owner_id = _text(owner_kind, "owner_kind"), _text(owner_id, "owner_id")
    if bool(owner_kind) != bool(owner_id):
        raise ValueError("owner_kind and owner_id are given together, or neither is")
    return owner_kind, owner_id


def _text(value: Any, name: str) -> str:
    """Return a text that a column takes. Raises TypeError or ValueError, naming the argument."""
    if not isinstance(value, str):
        raise TypeError(f"{name} takes text, not {type(value).__name__}")
    if name != "preferred_name":
        if len(value) > COLUMN_CHARACTERS:
            raise ValueError(f"{name} has {len(value)} characters; {COLUMN_CHARACTERS} are allowed")
        if "\x00" in value:
            raise ValueError(f"{name} contains a NUL character")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is not valid Unicode: {error}") from error
    return "".join((value, ""))


def _key(kind: str, owner_kind: str, owner_id: str, key: str) -> str:
    """Return a key as it is stored: of one kind and owner."""
    key = check_key(key)
    owner = ":".join(map(_escaped, (owner_kind, owner_id)))
    whole = f"{kind}:{owner}:{key}"
    if len(whole) > KEY_CHARACTERS:
        raise ValueError(
            f"key has {len(whole)} characters with kind and owner; {KEY_CHARACTERS} are allowed"
        )
    return whole


def _escaped(part: str) -> str:
    """Return a part of a key in which no colon looks like the end of it."""
    return part.replace("\\", "\\\\").replace(":", "\\:")


def _language(given: str | None) -> str | None:
    language = translation.get_language() if given is None else given
    if language is None:
        return None
    if not isinstance(language, str):
        raise TypeError(f"language takes a language code, not {type(language).__name__}")
    if LANGUAGE.fullmatch(language):
        return language
    raise ValueError(f"language takes a language code, not {language!r}")


def _zone(given: str | None) -> str | None:
    from myxo_jobs.services.rows import zone_of

    if given is None:
        # One that has no name cannot be stored: the project's then.
        name = timezone.get_current_timezone_name()
        return name if len(name) <= ZONE_CHARACTERS and zone_of(name) else None
    if not isinstance(given, str):
        raise TypeError(f"time_zone takes the name of a zone, not {type(given).__name__}")
    if not given or len(given) > ZONE_CHARACTERS or zone_of(given) is None:
        raise ValueError(f"time_zone takes the name of a zone, not {given!r}")
    return given


# -- find --------------------------------------------------------------------------


def get_job(uid: object) -> ServiceJob | None:
    """Return a kept job, payload and result decoded; None if there is none of that uid."""
    from myxo_jobs.services.rows import ServiceJob, uid_of

    found = uid_of(uid)
    return None if found is None else ServiceJob.objects.filter(uid=found).first()


def list_jobs(
    kind: str | None = None,
    status: str | None = None,
    owner: Any = None,
    *,
    expired: bool = False,
) -> QuerySet[ServiceJob]:
    """Return kept jobs, newest first, without the expired; what is long is fetched when asked for.

    `owner` is a user, any other saved model instance, or `(kind, id)`.
    """
    from django.db.models import Q
    from django.db.models.functions import Now

    from myxo_jobs.models import LONG_COLUMNS
    from myxo_jobs.services.rows import ServiceJob

    rows = ServiceJob.objects.filter(uid__isnull=False).order_by("-uid").defer(*LONG_COLUMNS)
    conditions = {} if kind is None else {"topic": kind}
    if status is not None:
        conditions |= _of_status(status)
    if owner is not None:
        conditions |= _of_owner(owner)
    if any(isinstance(value, str) and "\x00" in value for value in conditions.values()):
        return rows.none()  # no column has one, and a database may refuse the question
    rows = rows.filter(**conditions)
    if not expired:
        is_open = Q(failed=False, due__isnull=False)
        rows = rows.filter(is_open | Q(expires_at__isnull=True) | Q(expires_at__gt=Now()))
    return rows


def _of_owner(owner: Any) -> dict[str, Any]:
    if not isinstance(owner, tuple):
        owner = owner_of(owner)
    elif len(owner) != 2 or not isinstance(owner[0], str):
        raise ValueError(
            f"owner takes a user, another saved model instance or (kind, id), not {owner!r}"
        )
    return {"owner_kind": owner[0], "owner_id": str(owner[1])}


def _of_status(status: str) -> dict[str, Any]:
    """Return the conditions of a status, as the indexes have them."""
    if status not in STATUSES:
        raise ValueError(f"status takes one of {', '.join(STATUSES)}, not {status!r}")
    if status == "failed":
        return {"failed": True}
    conditions: dict[str, Any] = {"failed": False, "due__isnull": status == "done"}
    return conditions if status == "done" else {**conditions, "status": status}


def touch_job(uid: object, extend_seconds: float | timedelta | None = None) -> bool:
    """Note that a job was fetched, and make an ended one last so long from now at least.

    By default as long as its service keeps its jobs. Tells whether there was one; an expired
    one is not revived.
    """
    from myxo_jobs import queue
    from myxo_jobs.services.rows import ServiceJob, uid_of

    given = None if extend_seconds is None else seconds_of(extend_seconds, "extend_seconds")
    found = uid_of(uid)
    row = ServiceJob.objects.filter(uid=found).values("pk", "topic").first() if found else None
    if row is None:
        return False
    seconds = retention_of(row["topic"]) if given is None else given
    return queue.touch(connections[queue.alias()], row["pk"], seconds)


def retention_of(kind: str) -> float:
    """Return how many seconds an ended job of a kind stays, as it is set now."""
    from myxo_jobs import queue
    from myxo_jobs.services.dials import dials_of

    if services.get(kind) is not None:
        return dials_of(kind, queue.alias()).keep or 0.0
    handler = registry.of_topic(kind)
    return (handler.keep if handler else None) or 0.0


# -- end ---------------------------------------------------------------------------


def cancel_job(uid: object) -> str | None:
    """Ask a job to stop; return its status, None if there is none.

    One that waits fails now; one that runs is told within two seconds. Its status tells
    nothing of a service that is not `cancellable`: its jobs stay as they are.
    """
    from myxo_jobs import queue

    job_id = _id_of(uid)
    if job_id is None:
        return None
    queue.cancel(queue.alias(), job_id)
    return _status_of(job_id)


def delete_job(uid: object) -> bool:
    """End a job's life now; tell whether its row is gone.

    One that waits is cancelled first; one that runs is only asked to stop, so call it again
    when it has ended. What the service and its files need done is done before.
    """
    from myxo_jobs import queue

    job_id = _id_of(uid)
    if job_id is None:
        return True
    alias = queue.alias()
    if _status_of(job_id) in ("pending", "running"):
        queue.cancel(alias, job_id)
    return queue.remove_ended(alias, job_id)


def _id_of(uid: object) -> int | None:
    from myxo_jobs.services.rows import ServiceJob, uid_of

    found = uid_of(uid)
    rows = ServiceJob.objects.filter(uid=found).values_list("pk", flat=True)
    return None if found is None else rows.first()


def _status_of(job_id: int) -> str | None:
    from myxo_jobs.models import Job

    return Job.objects.filter(pk=job_id).values_list("status", flat=True).first()


# -- count -------------------------------------------------------------------------


def service_stats(kind: str | None = None, days: float = 30) -> dict[str, Any]:
    """Return what the jobs of the last days, of one kind or of all services, come to.

    Of the rows there are: `pending`, `running`, `done` and `failed` count them, `items`,
    `bytes_in` and `bytes_out` add up what done ones told, `mean_seconds` and `p95_seconds`
    say how long those took (None where there is none), and `space_held` how many bytes their
    files have.
    """
    from django.db.models import Avg, Count, Sum
    from django.db.models.functions import Now, Right

    from myxo_jobs.services.rows import ServiceJob

    kinds = [one.kind for one in services] if kind is None else [service_of(kind).kind]
    since = Now() - _days(days)
    rows = ServiceJob.objects.filter(topic__in=kinds, uid__isnull=False, created_at__gte=since)
    counts = dict(rows.values_list("status").annotate(Count("pk")))
    done = rows.filter(failed=False, due__isnull=True)
    sums = done.aggregate(
        items=Sum("item_count"),
        bytes_in=Sum("bytes_in"),
        bytes_out=Sum("bytes_out"),
        mean=Avg("duration_ms"),
        timed=Count("duration_ms"),
    )
    p95 = None
    if sums["timed"]:
        times = done.filter(duration_ms__isnull=False).order_by("duration_ms")
        p95 = times.values_list("duration_ms", flat=True)[math.ceil(sums["timed"] * 0.95) - 1]
    with_file = done.filter(expires_at__gt=Now(), result__contains='"file_bytes":')
    ends = with_file.values_list(Right("result", RESULT_END_CHARACTERS), flat=True)
    return {
        **{status: counts.get(status, 0) for status in STATUSES},
        "items": sums["items"] or 0,
        "bytes_in": sums["bytes_in"] or 0,
        "bytes_out": sums["bytes_out"] or 0,
        "mean_seconds": None if sums["mean"] is None else float(sums["mean"]) / 1000,
        "p95_seconds": None if p95 is None else p95 / 1000,
        "space_held": sum(map(_file_bytes, ends.iterator())),
    }


def _days(days: Any) -> timedelta:
    if isinstance(days, bool) or not isinstance(days, (int, float)):
        raise TypeError(f"days takes a number, not {type(days).__name__}")
    if not 0 <= days <= MOST_DAYS:
        raise ValueError(f"days takes a number from 0 to {MOST_DAYS:,}, not {days!r}")
    return timedelta(days=days)


def _file_bytes(end: str) -> int:
    """Return the size of the file of a job, by the end of its result: 0 without a file of ours."""
    told = TOLD_FILE.search(end)
    return int(told[1]) if told else 0
