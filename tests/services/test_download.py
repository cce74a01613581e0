"""The download: whole or in part, to its owner alone, and never an error of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.files.base import File
from django.core.files.storage import FileSystemStorage, storages
from django.db import connections, transaction
from django.test import AsyncClient
from django.utils.http import http_date

from myxo_jobs.models import Job
from myxo_jobs.services import JobService, accel, get_job, register, signed_redirect
from tests.rig import ago, in_threads

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("private")]

BYTES = bytes(range(256)) * 4000  # more than one piece


@pytest.fixture(autouse=True)
def export() -> Iterator[type[JobService]]:
    @register
    class Export(JobService):
        kind = "export"

        def process(self, job: Any) -> None: ...

    return Export


def get(reader: Any, job: Any, **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return reader.client.get(f"/jobs/{job.uid}/download/", headers=names)


def body(response: Any) -> bytes:
    return b"".join(response) if response.streaming else response.content


# -- whole -----------------------------------------------------------------------------


def test_the_owner_gets_all_bytes_as_an_attachment(reader):
    job = reader.job_with_file(BYTES, preferred_name="My notes.csv")
    response = get(reader, job)

    assert response.status_code == 200
    assert body(response) == BYTES
    expected = {
        "Content-Length": str(len(BYTES)),
        "Content-Type": "text/csv",
        "Content-Disposition": 'attachment; filename="My notes.csv"',
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
        "Last-Modified": http_date(job.completed_at.timestamp()),
    }
    assert {name: response[name] for name in expected} == expected
    assert response["ETag"].startswith('"')


async def _fetch(user: Any, uid: object, headers: dict[str, str]) -> tuple[Any, bytes, int]:
    client = AsyncClient()
    await client.aforce_login(user)
    response: Any = await client.get(f"/jobs/{uid}/download/", headers=headers)
    pieces = [piece async for piece in response] if response.streaming else [response.content]
    return response, b"".join(pieces), len(pieces)


@pytest.mark.django_db(transaction=True)
def test_under_asgi_it_comes_in_pieces_too_and_touches_the_job(reader):
    job = reader.job_with_file(BYTES, expires_at=ago(-60))
    response, content, pieces = async_to_sync(_fetch)(reader.user, job.uid, {})
    part, some, _ = async_to_sync(_fetch)(reader.user, job.uid, {"Range": "bytes=10-19"})

    assert response.is_async
    assert content == BYTES
    assert pieces > 1
    assert (part.status_code, some) == (206, BYTES[10:20])
    assert get_job(job.uid).expires_at > job.expires_at


@pytest.mark.parametrize(
    ("preferred", "stored", "header"),
    [
        ("", "notes.csv", 'attachment; filename="notes.csv"'),
        ('a"b\\c.csv', "notes.csv", 'attachment; filename="a\\"b_c.csv"'),
        ("Größe.csv", "notes.csv", "attachment; filename*=utf-8''Gr%C3%B6%C3%9Fe.csv"),
        ("a\r\nSet-Cookie: x=1.csv", "n.csv", 'attachment; filename="aSet-Cookie: x=1.csv"'),
        ("../../etc/passwd", "n.csv", 'attachment; filename="_.._etc_passwd"'),
        ("\u202egpj.exe", "n.csv", 'attachment; filename="gpj.exe"'),
        ("\r\n", "n.csv", 'attachment; filename="n.csv"'),
    ],
)
def test_a_name_that_sql_has_written_injects_no_header(reader, preferred, stored, header):
    job = reader.job_with_file(name=stored, preferred_name=preferred)
    response = get(reader, job)

    assert response["Content-Disposition"] == header
    assert "Set-Cookie" not in response
    assert body(response) == b"one,two\r\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.html", "text/html"),
        ("a.csv.gz", "application/octet-stream"),
        ("a", "application/octet-stream"),
        ("a.zip", "application/zip"),
    ],
)
def test_whatever_it_is_it_is_saved_and_not_shown(reader, name, kind):
    response = get(reader, reader.job_with_file(name=name))
    body(response)

    assert response["Content-Type"] == kind
    assert response["Content-Disposition"].startswith("attachment")
    assert response["X-Content-Type-Options"] == "nosniff"


@pytest.mark.django_db(transaction=True)
def test_it_is_never_compressed_on_the_way(reader, settings):
    settings.MIDDLEWARE = ["django.middleware.gzip.GZipMiddleware", *settings.MIDDLEWARE]
    job = reader.job_with_file(b"a" * 100_000)
    response = get(reader, job, Accept_Encoding="gzip, deflate, br")

    assert response["Content-Encoding"] == "identity"
    assert body(response) == b"a" * 100_000
    assert not response["ETag"].startswith("W/")
    _, content, _ = async_to_sync(_fetch)(reader.user, job.uid, {"Accept-Encoding": "gzip"})
    assert content == b"a" * 100_000
    document = reader.client.get(f"/jobs/{job.uid}/", headers={"Accept-Encoding": "gzip"})
    assert document["Content-Encoding"] == "gzip"  # the middleware is on


def test_an_empty_file_is_a_file(reader):
    job = reader.job_with_file(b"")

    for headers in ({}, {"Range": "bytes=-5"}):
        response = get(reader, job, **headers)
        assert (response.status_code, body(response)) == (200, b"")
        assert response["Content-Length"] == "0"


# -- parts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=2-5", 2, 5),
        ("bytes=5-", 5, 9),
        ("bytes=5-500", 5, 9),
        ("bytes=-3", 7, 9),
        ("bytes=-500", 0, 9),
        ("bytes=0-9", 0, 9),
    ],
)
def test_one_range_of_bytes_is_sent_alone(reader, asked, first, last):
    response = get(reader, reader.job_with_file(b"0123456789"), Range=asked)

    assert response.status_code == 206
    assert response["Content-Range"] == f"bytes {first}-{last}/10"
    assert response["Content-Length"] == str(last - first + 1)
    assert body(response) == b"0123456789"[first : last + 1]


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=10-12", "bytes=-0", f"bytes={10**30}-"])
def test_a_range_that_is_not_there_is_416(reader, asked):
    response = get(reader, reader.job_with_file(b"0123456789"), Range=asked)

    assert response.status_code == 416
    assert response["Content-Range"] == "bytes */10"
    assert body(response) == b""


@pytest.mark.parametrize(
    "asked",
    [
        "bytes=5-2",
        "bytes=a-b",
        "bytes=",
        "bytes=-",
        "items=0-1",
        "bytes=0-1,3-4",
        "bytes=٣-",
        "0-1",
    ],
)
def test_what_is_no_range_or_several_gets_the_whole(reader, asked):
    response = get(reader, reader.job_with_file(b"0123456789"), Range=asked)

    assert (response.status_code, body(response)) == (200, b"0123456789")


def test_if_range_goes_on_with_the_same_file_and_begins_again_with_another(reader):
    job = reader.job_with_file(b"0123456789")
    whole = get(reader, job)
    for same in (whole["ETag"], whole["Last-Modified"]):
        assert body(get(reader, job, Range="bytes=4-", If_Range=same)) == b"456789"
    for other in (
        '"another"',
        f"W/{whole['ETag']}",
        http_date(job.completed_at.timestamp() - 60),
        "x",
    ):
        response = get(reader, job, Range="bytes=4-", If_Range=other)
        assert (response.status_code, body(response)) == (200, b"0123456789")
    body(whole)


def test_the_validators_are_of_the_attempts_file_and_the_same_in_every_process(reader):
    job = reader.job_with_file(b"0123456789")
    first, again = get(reader, job), get(reader, job)
    result = json.loads(Job.objects.get(pk=job.pk).result)
    other_name = result["file"].replace("/token/", "/other/")
    storages["myxo_jobs"].save(other_name, File(BytesIO(b"9876543210")))
    Job.objects.filter(pk=job.pk).update(result=json.dumps(result | {"file": other_name}))
    after = get(reader, job)

    assert first["ETag"] == again["ETag"] != after["ETag"]
    for response in (first, again, after):
        assert "token" not in str(response.headers)
        body(response)


def test_who_has_it_already_is_told_so(reader):
    job = reader.job_with_file(b"0123456789")
    whole = get(reader, job)
    body(whole)

    for headers in (
        {"If_None_Match": whole["ETag"]},
        {"If_Modified_Since": whole["Last-Modified"]},
        {"If_None_Match": whole["ETag"], "Range": "bytes=99-"},
    ):
        response = get(reader, job, **headers)
        assert (response.status_code, body(response)) == (304, b"")
        assert response["Cache-Control"] == "private, no-cache"
    assert get(reader, job, If_Match='"another"').status_code == 412


# -- storages --------------------------------------------------------------------------


class Watched(FileSystemStorage):
    """A storage that notes what is opened; without seeking, as one behind a network."""

    opened: list[str] = []
    seeks = True

    def _open(self, name: str, mode: str = "rb") -> File[bytes]:
        self.opened.append(name)
        file = super()._open(name, mode)
        if not self.seeks:
            file.file = Streamed(file.file)
        return file


class Streamed:
    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        return bytes(self._file.read(min(size, 100)))

    def seekable(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def watched(settings: Any, private: Path) -> Iterator[type[Watched]]:
    settings.STORAGES = {
        **settings.STORAGES,
        "myxo_jobs": {
            "BACKEND": "tests.services.test_download.Watched",
            "OPTIONS": {"location": str(private)},
        },
    }
    Watched.opened, Watched.seeks = [], True
    yield Watched
    Watched.seeks = True


def test_a_storage_that_is_no_folder_sends_its_files_as_well(reader, settings):
    settings.STORAGES = {
        **settings.STORAGES,
        "myxo_jobs": {"BACKEND": "django.core.files.storage.InMemoryStorage"},
    }
    job = reader.job_with_file(b"0123456789")

    assert body(get(reader, job)) == b"0123456789"
    assert body(get(reader, job, Range="bytes=-3")) == b"789"
    assert reader.client.head(f"/jobs/{job.uid}/download/").status_code == 200
    storages["myxo_jobs"].delete(json.loads(Job.objects.get(pk=job.pk).result)["file"])
    assert get(reader, job).status_code == 404
    assert reader.client.head(f"/jobs/{job.uid}/download/").status_code == 404


def test_head_opens_nothing_and_tells_as_much(reader, watched):
    job = reader.job_with_file(b"0123456789", preferred_name="a.csv")
    head = reader.client.head(f"/jobs/{job.uid}/download/")
    assert watched.opened == []
    whole = get(reader, job)

    assert (head.status_code, head.content) == (200, b"")
    for name in ("Content-Length", "Content-Type", "Content-Disposition", "ETag", "Last-Modified"):
        assert head[name] == whole[name]
    assert body(whole) == b"0123456789"
    assert get_job(job.uid).last_accessed_at is not None


def test_a_file_that_cannot_seek_is_sent_whole(reader, watched):
    watched.seeks = False
    response = get(reader, reader.job_with_file(BYTES), Range="bytes=5-9")

    assert (response.status_code, response["Accept-Ranges"]) == (200, "none")
    assert response["Content-Length"] == str(len(BYTES))
    assert body(response) == BYTES


@pytest.mark.django_db(transaction=True)
def test_a_file_is_closed_however_the_download_ends(reader, watched, monkeypatch):
    closed: list[str] = []
    close = File.close

    def note(file: Any) -> None:
        closed.append(file.name)
        close(file)

    monkeypatch.setattr(File, "close", note)
    job = reader.job_with_file(b"0123456789")
    del closed[:]
    whole = get(reader, job)
    body(whole)
    whole.close()
    get(reader, job).close()  # nobody read it
    get(reader, job, Range="bytes=99-")
    get(reader, job, If_None_Match=whole["ETag"])

    assert len(watched.opened) == 4
    assert len(closed) >= 4


@pytest.mark.parametrize("headers", [{}, {"Accept": "text/html"}], ids=["json", "page"])
@pytest.mark.parametrize("method", ["get", "head"])
@pytest.mark.parametrize("gone", ["file", "folder", "storage", "alias"])
def test_a_file_that_is_gone_is_404(reader, private, settings, headers, method, gone):
    job = reader.job_with_file()
    stored = private / json.loads(Job.objects.get(pk=job.pk).result)["file"]
    if gone == "alias":
        settings.STORAGES = {n: s for n, s in settings.STORAGES.items() if n != "myxo_jobs"}
    else:
        stored.unlink()
    if gone == "folder":
        stored.mkdir()
    if gone == "storage":
        stored.parent.rmdir()
        stored.parent.write_text("a file now")

    ask = getattr(reader.client, method)
    response = ask(f"/jobs/{job.uid}/download/", headers=headers)
    if (gone, method) != ("folder", "head"):
        assert response.status_code == 404
    assert reader.document(job)["status"] == "done"


@pytest.mark.parametrize(
    "result",
    [
        {"file": "../../etc/passwd", "storage": "myxo_jobs", "file_bytes": 5},
        {"file": "myxo_jobs/export/../secret", "storage": "myxo_jobs", "file_bytes": 5},
        {"file": "{folder}/../../secret", "storage": "myxo_jobs", "file_bytes": 5},
        {"file": "{folder}/token/notes.csv", "storage": "none", "file_bytes": 5},
        {"file": "{folder}/token/notes.csv", "storage": 7, "file_bytes": 5},
        {"file": "{folder}/token/notes.csv"},
        {"file": 7, "storage": "myxo_jobs", "file_bytes": 5},
        {"file": "{folder}", "storage": "myxo_jobs", "file_bytes": 5},
        {"file": "secret", "storage": "default", "file_bytes": 5},
        ["file"],
        None,
    ],
    ids=str,
)
def test_only_a_file_that_a_run_of_the_job_has_written_is_sent(reader, private, result):
    job = reader.job()
    (private / "secret").write_text("secret")
    folder = f"myxo_jobs/export/{job.uid}"
    Job.objects.filter(pk=job.pk).update(result=json.dumps(result).replace("{folder}", folder))

    assert get(reader, job).status_code == 404


@pytest.mark.parametrize("status", ["pending", "running", "failed"])
def test_a_job_that_is_not_done_has_no_file(reader, status):
    job = reader.job_with_file()
    columns = {"due": ago(1), "failed": status == "failed"}
    Job.objects.filter(pk=job.pk).update(worker="x" if status == "running" else "", **columns)

    assert get(reader, job).status_code == 404
    assert reader.document(job)["download_url"] is None


class Broken(FileSystemStorage):
    def _open(self, name: str, mode: str = "rb") -> File[bytes]:
        raise ConnectionError("the storage is away")


def test_a_storage_that_is_away_is_no_error_of_ours(reader, settings, private):
    job = reader.job_with_file()
    settings.STORAGES = {
        **settings.STORAGES,
        "myxo_jobs": {"BACKEND": "tests.services.test_download.Broken"},
    }
    response = get(reader, job)

    assert response.status_code == 503
    assert response["Retry-After"]


# -- it lasts --------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_the_first_piece_makes_the_job_last_as_long_as_its_retention(reader):
    job = reader.job_with_file(BYTES, expires_at=ago(-60))
    response = get(reader, job)
    assert get_job(job.uid).last_accessed_at is None

    next(iter(response))
    touched = get_job(job.uid)
    assert (touched.expires_at - datetime.now(UTC)).days >= 6
    assert touched.last_accessed_at is not None
    response.close()


def test_it_is_touched_at_most_once_a_minute(reader):
    job = reader.job_with_file()
    body(get(reader, job))
    first = get_job(job.uid).last_accessed_at
    body(get(reader, job))
    assert get_job(job.uid).last_accessed_at == first

    Job.objects.filter(pk=job.pk).update(last_accessed_at=ago(61))
    body(get(reader, job))
    assert get_job(job.uid).last_accessed_at >= first


@pytest.mark.django_db(transaction=True)
def test_a_download_goes_on_beside_somebody_who_has_locked_the_row_or_the_database(reader):
    job = reader.job_with_file(BYTES)
    locked, go_on = threading.Event(), threading.Event()

    def lock() -> None:
        with transaction.atomic():
            Job.objects.filter(pk=job.pk).update(preferred_name="x.csv")
            locked.set()
            assert go_on.wait(30)

    def fetch() -> bytes:
        try:
            assert locked.wait(30)
            return body(get(reader, job))
        finally:
            go_on.set()

    _, content = in_threads(lock, fetch, within=60)
    assert content == BYTES
    assert get_job(job.uid).last_accessed_at is None


@pytest.mark.django_db(transaction=True)
def test_the_connection_waits_for_locks_as_before_after_a_touch(reader):
    job = reader.job_with_file()
    connection = connections["default"]
    ask = "PRAGMA busy_timeout" if connection.vendor == "sqlite" else "SHOW lock_timeout"

    def patience() -> Any:
        with connection.cursor() as cursor:
            cursor.execute(ask)
            return cursor.fetchone()

    before = patience()
    body(get(reader, job))
    assert get_job(job.uid).last_accessed_at is not None
    assert patience() == before


# -- others send it --------------------------------------------------------------------


class Signed(FileSystemStorage):
    """Signs as the S3 storage of django-storages does."""

    def url(self, name: str, parameters: Any = None, expire: int = 3600) -> str:
        return f"https://files.example/{name}?expire={expire}&{sorted((parameters or {}).items())}"


class AzureStorage(Signed):
    """Named, and signing, as the one of django-storages."""


class GoogleCloudStorage(FileSystemStorage):
    """As the one of django-storages, whose `url` takes no `expire`."""

    def url(self, name: str, parameters: Any = None) -> str:
        return f"https://files.example/{name}?{sorted((parameters or {}).items())}"


class Public(Signed):
    querystring_auth = False


def use(settings: Any, private: Path, storage: str) -> None:
    settings.STORAGES = {
        **settings.STORAGES,
        "myxo_jobs": {
            "BACKEND": f"tests.services.test_download.{storage}",
            "OPTIONS": {"location": str(private)},
        },
    }


@pytest.mark.parametrize(
    ("storage", "signed"),
    [
        ("Signed", ("expire=300", "ResponseContentDisposition")),
        ("AzureStorage", ("expire=300", "content_disposition")),
        ("GoogleCloudStorage", ("seconds=300", "response_disposition")),
    ],
)
def test_a_signed_redirect_sends_to_the_storage_for_five_minutes(
    reader, export, settings, private, monkeypatch, storage, signed
):
    monkeypatch.setattr(export, "respond", signed_redirect)
    use(settings, private, storage)
    job = reader.job_with_file(preferred_name="My notes.csv")
    response = get(reader, job)

    assert response.status_code == 302
    assert response["Location"].startswith(f"https://files.example/myxo_jobs/export/{job.uid}/")
    for words in (*signed, "My%20notes.csv"):
        assert words in response["Location"]
    assert response["Cache-Control"] == "private, no-cache"
    assert get_job(job.uid).last_accessed_at is not None


@pytest.mark.parametrize("storage", ["Watched", "Public"])
def test_a_storage_whose_addresses_do_not_end_is_not_redirected_to(
    reader, export, settings, private, monkeypatch, storage
):
    monkeypatch.setattr(export, "respond", signed_redirect)
    use(settings, private, storage)

    assert body(get(reader, reader.job_with_file())) == b"one,two\r\n"


def test_accel_lets_nginx_send_the_file(reader, export, monkeypatch):
    monkeypatch.setattr(export, "respond", accel("/protected/"))
    job = reader.job_with_file(name="a b%.csv", preferred_name="notes.csv")
    response = get(reader, job)

    assert response["X-Accel-Redirect"] == (
        f"/protected/myxo_jobs/export/{job.uid}/token/a%20b%25.csv"
    )
    assert response["Content-Disposition"] == 'attachment; filename="notes.csv"'
    assert response["Content-Type"] == "text/csv"
    assert (response.status_code, response.content) == (200, b"")


def test_a_service_may_answer_a_download_itself_after_the_same_check(
    reader, another, export, monkeypatch
):
    from django.http import HttpResponse

    def respond(self: JobService, request: Any, job: Any) -> HttpResponse | None:
        return HttpResponse(b"mine") if job.result["words"] == 3 else None

    monkeypatch.setattr(export, "respond", respond)
    job, expired = reader.job_with_file(), reader.job_with_file(expires_at=ago(1))

    assert body(get(reader, job)) == b"mine"
    assert get(another, job).status_code == 404
    assert get(reader, expired).status_code == 404


@pytest.mark.django_db(transaction=True)
def test_many_downloads_under_asgi_run_beside_each_other(reader):
    job = reader.job_with_file(BYTES)

    async def all_at_once() -> list[bytes]:
        fetched = await asyncio.gather(*[_fetch(reader.user, job.uid, {}) for _ in range(5)])
        return [content for _, content, _ in fetched]

    assert async_to_sync(all_at_once)() == [BYTES] * 5
    with contextlib.suppress(AttributeError):
        connections.close_all()
