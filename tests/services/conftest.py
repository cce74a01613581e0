"""What the tests of services share: a private storage, and services with a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from myxo_jobs.services import get_job
from myxo_jobs.services.rows import ServiceJob
from tests.rig import wait_until


@pytest.fixture(autouse=True)
def private(settings: Any, tmp_path: Path) -> Path:
    """The folder of a private storage, which services use in these tests."""
    folder = tmp_path / "private"
    folder.mkdir()
    settings.STORAGES = {
        **settings.STORAGES,
        "default": {
            "BACKEND": "django.core.files.storage.FileSystemStorage",
            "OPTIONS": {"location": str(tmp_path / "media")},
        },
        "myxo_jobs": {
            "BACKEND": "django.core.files.storage.FileSystemStorage",
            "OPTIONS": {"location": str(folder)},
        },
    }
    return folder


@pytest.fixture
def files(private: Path) -> Callable[[], list[str]]:
    """Return the names of all files in the private storage."""

    def names() -> list[str]:
        return sorted(str(p.relative_to(private)) for p in private.rglob("*") if p.is_file())

    return names


@pytest.fixture
def ended() -> Callable[[str], ServiceJob]:
    """Wait until a job has ended, done or failed, and return it."""

    def wait(uid: str) -> ServiceJob:
        def look() -> ServiceJob | None:
            job = get_job(uid)
            return job if job is not None and job.status in ("done", "failed") else None

        return wait_until(look, because="it has ended, and stays", within=30)

    return wait
