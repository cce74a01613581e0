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


@cache
def settings() -> Settings:
    """Return the settings in effect.

    Raises SettingsInvalid when MYXO_JOBS has an unknown name or a value of
    another type, naming it.
    """
    given = getattr(django_settings, "MYXO_JOBS", {})
    try:
        return msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(f"MYXO_JOBS: {error}; {type_error_hint}") from None


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "MYXO_JOBS":
        settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="myxo_jobs.conf")
