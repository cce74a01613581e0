"""The one setting, MYXO_JOBS: a dict in which everything has a default."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import msgspec
from django.conf import settings as django_settings
from django.core.signals import setting_changed

from myxo_jobs.errors import SettingsInvalid

type_error_hint = "docs/reference/settings.md lists the names and their types"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What MYXO_JOBS may hold."""

    # The longest payload a put accepts, in bytes of UTF-8.
    payload_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1024 * 1024
    # How long an idle worker waits before it looks again.
    poll_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 1.0
    # How long a worker that was told to stop waits for the jobs it runs.
    grace_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 30.0
    # The alias of STORAGES that services keep their files in; empty: `myxo_jobs` if the
    # project defines it, else `default`.
    storage: str = ""
    # Where the site is, for the addresses that services tell: "https://example.com".
    base_url: str = ""


class KindSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What MYXO_JOBS may hold of one kind of service, each name after `<kind>_`."""

    retention_seconds: Annotated[float, msgspec.Meta(ge=0, le=3_153_600_000)] | None = None
    max_concurrent: Annotated[int, msgspec.Meta(ge=0)] | None = None
    job_timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] | None = None


DIALS = KindSettings.__struct_fields__


@cache
def settings() -> Settings:
    """Return the settings in effect.

    Raises SettingsInvalid when MYXO_JOBS has an unknown name or a value of
    another type, naming it.
    """
    kind_settings()
    given = getattr(django_settings, "MYXO_JOBS", {})
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if not _of_kind(name)}
    try:
        return msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(f"MYXO_JOBS: {error}; {type_error_hint}") from None


@cache
def kind_settings() -> dict[str, KindSettings]:
    """Return what is set of kinds, by kind. Raises as `settings` does."""
    by_kind: dict[str, dict[str, object]] = {}
    given = getattr(django_settings, "MYXO_JOBS", {})
    for name, value in given.items() if isinstance(given, dict) else ():
        if found := _of_kind(name):
            kind, dial = found
            try:
                msgspec.convert({dial: value}, KindSettings)
            except msgspec.ValidationError as error:
                words = str(error).replace(f"$.{dial}", f"$.{name}")
                raise SettingsInvalid(f"MYXO_JOBS: {words}; {type_error_hint}") from None
            by_kind.setdefault(kind, {})[dial] = value
    return {kind: msgspec.convert(values, KindSettings) for kind, values in by_kind.items()}


def _of_kind(name: object) -> tuple[str, str] | None:
    """Return the kind and the dial that a name speaks of: `<kind>_<dial>`."""
    for dial in DIALS:
        kind = name.removesuffix(f"_{dial}") if isinstance(name, str) else name
        if kind and kind != name and isinstance(kind, str):
            return kind, dial
    return None


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "MYXO_JOBS":
        settings.cache_clear()
        kind_settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="myxo_jobs.conf")
