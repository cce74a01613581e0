"""What the tests of services share: a private storage, and services with a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.base import ContentFile
from django.core.files.storage import storages
from django.test import Client

from myxo_jobs.models import Job
from myxo_jobs.queue import uuid7
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


@pytest.fixture
def addresses(settings: Any) -> None:
    """A project that includes the addresses: see `tests.services.addresses`."""
    settings.ROOT_URLCONF = "tests.services.addresses"


class Reader:
    """A signed-in user, with a browser or a script of theirs, and jobs of their own."""

    def __init__(self, name: str, make_job: Callable[..., Any], **rights: bool) -> None:
        self.user = User.objects.create_user(name, **rights)
        self.client = Client()
        self.client.force_login(self.user)
        self._make_job = make_job

    def job(self, status: str = "done", kind: str = "export", **columns: Any) -> ServiceJob:
        """Make a job of the user, in a state that is far off."""
        columns = {"uid": uuid7(), "result": None, **columns}
        owner = {"owner_kind": "auth.user", "owner_id": str(self.user.pk)}
        row = self._make_job(kind, status=status, **owner | columns)
        return ServiceJob.objects.get(pk=row.pk)

    def job_with_file(
        self, content: bytes = b"one,two\r\n", name: str = "notes.csv", **columns: Any
    ) -> ServiceJob:
        """Make a done job of the user whose file is in the private storage."""
        job = self.job(**columns)
        stored = storages["myxo_jobs"].save(
            f"myxo_jobs/{job.kind}/{job.uid}/token/{name}", ContentFile(content)
        )
        told = {"file": stored, "storage": "myxo_jobs", "file_bytes": len(content), "words": 3}
        Job.objects.filter(pk=job.pk).update(result=json.dumps(told, separators=(",", ":")))
        return ServiceJob.objects.get(pk=job.pk)

    def document(self, job: ServiceJob, **headers: str) -> Any:
        response = self.client.get(f"/jobs/{job.uid}/", headers=headers)
        assert response.status_code == 200, response.content
        return response.json()


@pytest.fixture
def reader(addresses: None, make_job: Callable[..., Any]) -> Reader:
    return Reader("ada", make_job)


@pytest.fixture
def another(addresses: None, make_job: Callable[..., Any]) -> Reader:
    return Reader("eve", make_job)
