"""What `manage.py check` says about services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.files.storage import FileSystemStorage, Storage

from myxo_jobs import checks
from myxo_jobs.services import JobService, register


@pytest.fixture(autouse=True)
def export() -> None:
    @register
    class Export(JobService):
        kind = "export"

        def process(self, job: Any) -> None: ...


def ids(**options: Any) -> list[str]:
    return [message.id for message in run_checks(**options) if message.id is not None]


def test_a_service_with_a_private_storage_is_well():
    assert checks.check_storages() == checks.check_kinds() == checks.check_private_storage() == []


def test_a_storage_that_is_not_defined_is_an_error_that_names_the_service(settings):
    settings.MYXO_JOBS = {"storage": "nowhere"}
    messages = checks.check_storages()

    assert {message.id for message in messages} == {"myxo_jobs.E004"}
    assert any("'export'" in message.msg and "'nowhere'" in message.msg for message in messages)
    assert checks.check_private_storage() == []


def test_a_kind_that_nobody_registered_is_a_warning(settings):
    settings.MYXO_JOBS = {"export_max_concurrent": 2, "exprot_retention_seconds": 60}
    (message,) = checks.check_kinds()

    assert message.id == "myxo_jobs.W008"
    assert "'exprot'" in message.msg


class Signed(Storage):
    def url(self, name: str | None) -> str:
        return f"https://files.example/{name}?signature=x"


class Public(Storage):
    def url(self, name: str | None) -> str:
        return f"https://files.example/{name}"


class WithoutAddresses(Storage):
    """Its `url` raises NotImplementedError."""


@pytest.mark.parametrize(
    ("storage", "media", "is_public"),
    [
        (lambda folder: FileSystemStorage(location=folder / "private"), "media", False),
        (lambda folder: FileSystemStorage(location=folder / "private"), "", False),
        (lambda folder: FileSystemStorage(location=folder / "media/private"), "media", True),
        (lambda folder: FileSystemStorage(), "media", True),
        (lambda folder: FileSystemStorage(), "", True),
        (lambda folder: FileSystemStorage(folder / "private", "/files/"), "media", True),
        (lambda folder: Signed(), "media", False),
        (lambda folder: Public(), "media", True),
        (lambda folder: WithoutAddresses(), "media", False),
    ],
)
def test_a_storage_is_public_where_anybody_can_fetch_its_files(
    settings, tmp_path: Path, storage, media, is_public
):
    settings.MEDIA_ROOT = str(tmp_path / media) if media else ""

    assert checks.has_public_url(storage(tmp_path)) is is_public


def test_a_deployment_check_warns_of_public_files_and_shows_the_lines_that_cure_it(settings):
    settings.MYXO_JOBS = {"storage": "default"}
    settings.STORAGES = {
        **settings.STORAGES,
        "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    }
    settings.MEDIA_ROOT = "/srv/media"
    (message,) = checks.check_private_storage()

    assert message.id == "myxo_jobs.W009"
    assert "export" in message.msg
    assert "STORAGES = {" in message.hint
    assert '"location"' in message.hint
    assert "myxo_jobs.W009" in ids(tags=["myxo_jobs"], include_deployment_checks=True)
    assert "myxo_jobs.W009" not in ids(tags=["myxo_jobs"])
