"""The download: the file of a done job, whole or in a part, or a word to others to send it."""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import mimetypes
import re
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from asgiref.sync import sync_to_async
from django.core.exceptions import SuspiciousOperation
from django.core.files.storage import InvalidStorageError, Storage, storages
from django.core.handlers.asgi import ASGIRequest
from django.db import Error as DatabaseError
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header, http_date, parse_http_date_safe

from myxo_jobs.services.document import StoredFile, file_of, has_expired, read_at, service_for
from myxo_jobs.services.responses import PRIVATE, if_wanted, not_there

if TYPE_CHECKING:
    from myxo_jobs.services.rows import ServiceJob

logger = logging.getLogger("myxo_jobs")

PIECE_BYTES = 256 * 1024
# A download notes that it happened, and makes the job last, at most so often.
TOUCH_SECONDS = 60
SIGNED_SECONDS = 300
BYTE_RANGE = re.compile(r"bytes=[ \t]*(?:([0-9]+)-([0-9]*)|-([0-9]+))[ \t]*", re.ASCII)
GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
PLAIN = "application/octet-stream"


def file_response(request: HttpRequest, job: ServiceJob) -> HttpResponseBase:
    """Answer with the file of a job whose asker may see it, or with 404.

    Whole, or the range of bytes that the request names. The file is read in pieces. A
    service may let others send it: see `JobService.respond`.
    """
    file = None if has_expired(job) else file_of(job)
    if file is None:
        return not_there(request, job)
    response = service_for(job).respond(request, job)
    if response is not None:
        if request.method == "GET":
            touch(job)
        return response
    try:
        return _own_response(request, job, file)
    except (*GONE, InvalidStorageError, SuspiciousOperation) as error:
        logger.warning("job=%s topic=%s file cannot be sent: %r", job.pk, job.topic, error)
        return not_there(request, job)
    except Exception:
        # Its storage may be away for a while: the file is not gone by that.
        logger.exception("job=%s topic=%s file cannot be read", job.pk, job.topic)
        return HttpResponse(status=503, headers={"Cache-Control": PRIVATE, "Retry-After": "30"})


def _own_response(request: HttpRequest, job: ServiceJob, file: StoredFile) -> HttpResponseBase:
    storage = storages[file.storage]
    head = HttpResponse(headers={"Content-Length": str(file.bytes)})
    answer = _described(request, head, job, file)
    if request.method == "HEAD":
        if not storage.exists(file.stored_name):
            raise FileNotFoundError(file.stored_name)
        return answer

    content = storage.open(file.stored_name, "rb")
    try:
        if answer is not head:
            content.close()
            return answer
        return _streamed(request, job, file, content, dict(head.items()))
    except BaseException:
        content.close()
        raise


def _streamed(
    request: HttpRequest, job: ServiceJob, file: StoredFile, content: Any, headers: dict[str, str]
) -> HttpResponseBase:
    can_seek = bool(content.seekable())
    size = content.seek(0, io.SEEK_END) if can_seek else file.bytes
    part = _part(request, size, *_validators(job, file)) if can_seek else None
    if part == ():
        content.close()
        place = {"Content-Range": f"bytes */{size}", "Cache-Control": PRIVATE}
        return HttpResponse(status=416, headers=place)

    start, length = part or (0, size)
    if can_seek:
        content.seek(start)
    pieces = Pieces(content, length, job)
    is_async = isinstance(getattr(request, "_request", request), ASGIRequest)
    response = StreamingHttpResponse(AsyncPieces(pieces) if is_async else pieces, headers=headers)
    response["Content-Length"] = str(length)
    response["Accept-Ranges"] = "bytes" if can_seek else "none"
    if part:
        response.status_code = 206
        response["Content-Range"] = f"bytes {start}-{start + length - 1}/{size}"
    return response


def _described(
    request: HttpRequest, response: HttpResponseBase, job: ServiceJob, file: StoredFile
) -> HttpResponseBase:
    """Return a response with the headers of the file; or 304 or 412 if the asker wants that."""
    _name(response, file)
    tag, changed = _validators(job, file)
    response["ETag"] = tag
    response["Last-Modified"] = http_date(changed)
    # Who finds this leaves the bytes as they are: GZipMiddleware, nginx.
    response["Content-Encoding"] = "identity"
    answer = if_wanted(request, response, etag=tag, last_modified=changed)
    if answer is not response:
        answer["Cache-Control"] = PRIVATE
    return answer


def _name(response: HttpResponseBase, file: StoredFile) -> None:
    """Say that a response is a file to be kept, and what it is called."""
    kind, packed = mimetypes.guess_type(file.name)
    response["Content-Type"] = PLAIN if packed else kind or PLAIN
    response["Content-Disposition"] = content_disposition_header(True, file.name) or "attachment"
    response["X-Content-Type-Options"] = "nosniff"
    response["Cache-Control"] = PRIVATE


def _validators(job: ServiceJob, file: StoredFile) -> tuple[str, int]:
    """Return ETag and Last-Modified: of what the row tells, so the same in every process."""
    # The name has the token of its attempt: another run's file is another one.
    digest = hashlib.sha256(f"{file.stored_name}\n{file.bytes}".encode()).hexdigest()
    moment: datetime = job.completed_at or job.created_at
    return f'"{digest[:32]}"', int(moment.timestamp())


def _part(
    request: HttpRequest, size: int, tag: str, changed: int
) -> tuple[int, int] | tuple[()] | None:
    """Return where the asked range begins and how long it is.

    None: the whole file; empty: there is nothing at that place.
    """
    match = BYTE_RANGE.fullmatch(request.headers.get("Range", ""))
    condition = request.headers.get("If-Range", "").strip()
    if match is None or (condition and not _is_same(condition, tag, changed)):
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        length = min(int(suffix[:20]), size)
        if size == 0 and int(suffix[:20]):
            return None
        return (size - length, length) if length else ()
    start = int(first[:20])
    if last and int(last[:20]) < start:
        return None
    if start >= size:
        return ()
    end = min(int(last[:20]), size - 1) if last else size - 1
    return start, end - start + 1


def _is_same(condition: str, tag: str, changed: int) -> bool:
    if condition.endswith('"'):
        return condition == tag
    return parse_http_date_safe(condition) == changed


class Pieces:
    """The bytes of a file in pieces, from where it stands; the first one touches the job."""

    def __init__(self, content: Any, length: int, job: ServiceJob) -> None:
        self._content = content
        self._left = length
        self._job: ServiceJob | None = job

    def __iter__(self) -> Iterator[bytes]:
        self.touch()
        while piece := self.next():
            yield piece

    def next(self) -> bytes:
        piece: bytes = self._content.read(min(PIECE_BYTES, self._left))
        self._left -= len(piece)
        return piece

    def touch(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            touch(job)

    def close(self) -> None:
        self._content.close()


class AsyncPieces:
    """The same under ASGI: the event loop never waits for the file or the database."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await sync_to_async(self._pieces.touch)()
        while piece := await sync_to_async(self._pieces.next, thread_sensitive=False)():
            yield piece

    def close(self) -> None:
        self._pieces.close()


def touch(job: ServiceJob) -> None:
    """Note that a job was fetched, and make it last; not if that cannot be done at once."""
    from myxo_jobs import queue
    from myxo_jobs.services.door import retention_of

    last = job.last_accessed_at
    if last is not None and read_at(job) - last < timedelta(seconds=TOUCH_SECONDS):
        return
    try:
        queue.touch(connections[queue.alias()], job.pk, retention_of(job.kind), at_once=True)
    except DatabaseError as error:
        logger.warning("job=%s topic=%s fetch not noted: %r", job.pk, job.topic, error)


# -- others that send it -------------------------------------------------------------


class _SignedRedirect:
    """Answers with the storage's own address of the file, good for five minutes.

    For a service: `respond = signed_redirect`. A storage whose addresses do not end is not
    used: the site sends the file itself.
    """

    def __call__(self, request: HttpRequest, job: ServiceJob) -> HttpResponse | None:
        file = file_of(job)
        if file is None:
            return None
        arguments = _signing(storages[file.storage], file)
        if arguments is None:
            logger.warning(
                "job=%s topic=%s storage %r signs no addresses: the site sends the file",
                job.pk,
                job.topic,
                file.storage,
            )
            return None
        response = HttpResponseRedirect(storages[file.storage].url(file.stored_name, **arguments))
        response["Cache-Control"] = PRIVATE
        return response


def _signing(storage: Storage, file: StoredFile) -> dict[str, Any] | None:
    """Return what makes `storage.url` sign for five minutes; None when nothing does.

    As django-storages takes it: Amazon S3 and Azure an `expire`, Google its `expiration`
    among the parameters; and each its own name for the header that makes it an attachment.
    """
    takes = inspect.signature(storage.url).parameters
    header = content_disposition_header(True, file.name)
    names = {base.__name__ for base in type(storage).__mro__}
    if getattr(storage, "querystring_auth", True) is False:
        return None
    if "GoogleCloudStorage" in names and "parameters" in takes:
        seconds = timedelta(seconds=SIGNED_SECONDS)
        return {"parameters": {"expiration": seconds, "response_disposition": header}}
    if "expire" not in takes:
        return None
    if "AzureStorage" in names:
        return {"expire": SIGNED_SECONDS, "parameters": {"content_disposition": header}}
    if "parameters" in takes:
        return {"expire": SIGNED_SECONDS, "parameters": {"ResponseContentDisposition": header}}
    return {"expire": SIGNED_SECONDS}


signed_redirect = _SignedRedirect()


class _Accel:
    """Tells nginx to send the file, by `X-Accel-Redirect`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, request: HttpRequest, job: ServiceJob) -> HttpResponse | None:
        file = file_of(job)
        if file is None:
            return None
        response = HttpResponse()
        response["X-Accel-Redirect"] = self._prefix + quote(file.stored_name)
        _name(response, file)
        return response


def accel(prefix: str) -> _Accel:
    """Return what lets nginx send the files: `respond = accel("/protected/")`.

    `prefix` is an `internal` location of nginx, an alias of the folder of the storage.
    """
    return _Accel(prefix.rstrip("/") + "/")
