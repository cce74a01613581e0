"""The dials of services: of the admin first, then of the setting, then of the class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from myxo_jobs.conf import DIALS, KindSettings, kind_settings
from myxo_jobs.handlers import Dials
from myxo_jobs.services.service import services

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_IN_THE_ADMIN = (
    f"SELECT kind, {', '.join(DIALS)} FROM myxo_jobs_service_settings WHERE kind IN ({{}})"  # noqa: S608 - constants
)


def dials(connection: BaseDatabaseWrapper, kinds: Sequence[str]) -> Mapping[str, Dials]:
    """Return what stands now for some kinds; one statement."""
    with connection.cursor() as cursor:
        cursor.execute(_IN_THE_ADMIN.format(", ".join(["%s"] * len(kinds))), kinds)
        in_the_admin = {kind: values for kind, *values in cursor.fetchall()}
    found: dict[str, Dials] = {}
    for kind in kinds:
        service = services.get(kind)
        if service is None:
            continue
        in_settings = kind_settings().get(kind, KindSettings())
        values: dict[str, Any] = {}
        for place, dial in enumerate(DIALS):
            layers = [in_the_admin[kind][place]] if kind in in_the_admin else []
            layers.append(getattr(in_settings, dial))
            values[dial] = next(
                (value for value in layers if value is not None), getattr(service, dial)
            )
        found[kind] = Dials(
            keep=float(values["retention_seconds"]),
            limit=values["max_concurrent"],
            timeout=_float_or_none(values["job_timeout_seconds"]),
        )
    return found


def dials_of(kind: str, using: str) -> Dials:
    """Return what stands now for one kind of service."""
    from django.db import connections

    return dials(connections[using], [kind])[kind]


def _float_or_none(value: float | None) -> float | None:
    return None if value is None else float(value)
