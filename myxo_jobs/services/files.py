"""The files of jobs: written locally, stored once, and removed with their job.

They are under `myxo_jobs/<kind>/<uid>/<token>/`, a token for each attempt that nobody can
guess. Nothing outside is touched.
"""

from __future__ import annotations

import io
import logging
import posixpath
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.files import File
from django.core.files.storage import Storage, storages

from myxo_jobs.services.names import is_file_name

logger = logging.getLogger("myxo_jobs")

ROOT = "myxo_jobs"
TOKEN_BYTES = 18
STORED_NAME = re.compile(rf"(?P<folder>{ROOT}/[^/]+/(?P<uid>[^/]+))/[^/]+/[^/]+")


def folder_of(kind: str, uid: object) -> str:
    """Return the folder of a job's files, in its storage."""
    return f"{ROOT}/{kind}/{uid}"


def folder_of_file(name: object, uid: object) -> str | None:
    """Return the folder of a job that a file is in; None for a file of no run of that job.

    Its kind is not asked for: a kind may be renamed, and no file is.
    """
    match = STORED_NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or match["uid"] != str(uid) or posixpath.normpath(match[0]) != match[0]:
        return None
    return match["folder"]


class AttemptFiles:
    """What one attempt of a job writes."""

    def __init__(self, kind: str, uid: object, storage: str) -> None:
        self.storage = storage
        self.folder = f"{folder_of(kind, uid)}/{secrets.token_urlsafe(TOKEN_BYTES)}"
        # The size of each that is stored, by its name in the storage.
        self.sizes: dict[str, int] = {}
        self._begun: set[str] = set()

    def file(self, name: str, *, text: bool) -> JobFile:
        """Return a file to write in a `with` block. Raises ValueError for a bad or used name."""
        if not is_file_name(name):
            raise ValueError(f"file takes the plain name of a file, not {name!r}")
        if name in self._begun:
            raise ValueError(f"this attempt has written a file {name!r} already")
        return JobFile(self, name, text=text)

    def store(self, name: str, content: File[bytes]) -> str:
        """Store a file; return its name in the storage."""
        self._begun.add(name)
        size = content.size
        stored = storages[self.storage].save(f"{self.folder}/{name}", content)
        self.sizes[stored] = size
        return stored

    def remove(self) -> None:
        """Remove them: the attempt has failed. What cannot be removed the sweep removes."""
        if self._begun:
            names = {f"{self.folder}/{name}" for name in self._begun} | set(self.sizes)
            try_to_remove(storages[self.storage], self.folder, names)

    def remove_older(self) -> None:
        """Remove what earlier attempts left: their workers have died."""
        try_to_remove(storages[self.storage], self.folder.rpartition("/")[0])


class JobFile:
    """A local temporary file, of bytes or of text; stored when its `with` block ends well.

    `name` is its name in the storage and `size` its bytes, once it is stored.
    """

    def __init__(self, files: AttemptFiles, name: str, *, text: bool) -> None:
        self.name = f"{files.folder}/{name}"
        self.size = 0
        self._files = files
        self._own_name = name
        self._is_text = text
        self._bytes: Any = None
        self._open: Any = None

    def __enter__(self) -> JobFile:
        # Without a name, so that a killed worker leaves nothing behind.
        self._bytes = tempfile.TemporaryFile(dir=settings.FILE_UPLOAD_TEMP_DIR)
        self._open = self._bytes
        if self._is_text:
            # No translation of line ends, as the csv module asks for.
            self._open = io.TextIOWrapper(self._bytes, encoding="utf-8", newline="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._open.flush()
                self.size = self._bytes.seek(0, io.SEEK_END)
                self._bytes.seek(0)
                self.name = self._files.store(self._own_name, File(self._bytes, self._own_name))
        finally:
            with suppress(OSError):  # what is still to be written may find the disk full
                self._open.close()

    async def __aenter__(self) -> JobFile:
        return self.__enter__()

    async def __aexit__(self, *raised: Any) -> None:
        await sync_to_async(self.__exit__, thread_sensitive=False)(*raised)

    def write(self, content: Any) -> int:
        return int(self._file.write(content))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        # All else that a file can do. Private names are asked for by copy and pickle.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._file, name)

    @property
    def _file(self) -> Any:
        if self._open is None:
            raise ValueError("the file is open inside `with job.file(…) as f` alone")
        return self._open


# -- removing ----------------------------------------------------------------------


def remove_folder(storage: Storage, folder: str, names: Iterable[str] = ()) -> None:
    """Remove a folder of ours with all that is in it; it may be gone already.

    `names`: files in it, for a storage that cannot list. Raises what the storage raises.
    """
    try:
        folders, files = storage.listdir(folder)
    except FileNotFoundError:
        return
    except NotImplementedError:
        for name in names:
            storage.delete(name)
        return
    for name in files:
        storage.delete(f"{folder}/{name}")
    for name in folders:
        remove_folder(storage, f"{folder}/{name}")
    if is_local(storage):
        with suppress(OSError):  # somebody is faster, or writes into it again
            storage.delete(folder)


def try_to_remove(storage: Storage, folder: str, names: Iterable[str] = ()) -> bool:
    """Remove a folder of ours; what cannot be removed is logged, and left to the sweep."""
    try:
        remove_folder(storage, folder, names)
    except Exception:
        logger.exception("files=%s cannot be removed, tried again later", folder)
        return False
    return True


def is_local(storage: Storage) -> bool:
    """Tell whether a storage is a folder of this machine."""
    try:
        storage.path("")
    except NotImplementedError:
        return False
    return True


def remove_files_of(kind: str, uid: object, result: Any, storage: str) -> None:
    """Remove all files of a job, in the storage that its result names and in the service's."""
    told = result if isinstance(result, dict) else {}
    folder, theirs = folder_of(kind, uid), folder_of_file(told.get("file"), uid)
    places = {(storage, folder)}
    if theirs is not None:  # without a file, a service may tell of any storage it likes
        alias = str(told.get("storage") or storage)
        places |= {(alias, folder), (alias, theirs)}
    for alias, place in places:
        remove_folder(storages[alias], place, [told["file"]] if place == theirs else [])


# -- folders that no row names -------------------------------------------------------

# A folder without a row is left alone so long: its row may be in an open transaction.
STRAY_SECONDS = 24 * 3600
CHUNK = 500
# Looking takes at most so much of the time; and a storage elsewhere, where it may cost
# money, is looked at seldom.
SHARE = 0.01
FAR_SECONDS = 3600.0


class Strays:
    """Removes the folders of one kind that no row names, and what dead workers left in others."""

    def __init__(self, kind: str, storage: str) -> None:
        self._kind = kind
        self._storage = storage
        self._next = 0.0

    def sweep(self) -> None:
        """Look, if it is time to. What cannot be removed is logged, and tried again later."""
        began = time.monotonic()
        if began < self._next:
            return
        storage = storages[self._storage]
        try:
            self._sweep(storage)
        finally:
            pause = (time.monotonic() - began) / SHARE
            self._next = time.monotonic() + (
                pause if is_local(storage) else max(pause, FAR_SECONDS)
            )

    def _sweep(self, storage: Storage) -> None:
        names = folders_in(storage, f"{ROOT}/{self._kind}")
        uids = [uid for uid in map(_old_uid, names) if uid is not None]
        for start in range(0, len(uids), CHUNK):
            self._sweep_chunk(storage, uids[start : start + CHUNK])

    def _sweep_chunk(self, storage: Storage, uids: list[UUID]) -> None:
        from myxo_jobs.services.rows import ServiceJob

        rows = ServiceJob.objects.filter(uid__in=uids)
        there = dict(rows.values_list("uid", "status"))
        for uid in uids:
            if uid not in there:
                self._remove(storage, folder_of(self._kind, uid))
        # More than one attempt: one may have left its files, though its outcome was refused.
        ended = [uid for uid, status in there.items() if status in ("done", "failed")]
        for row in rows.filter(uid__in=ended, attempts__gt=1).only("uid", "topic", "result"):
            result = row.result if isinstance(row.result, dict) else {}
            kept = str(result.get("file", ""))
            folder = folder_of(self._kind, row.uid)
            for token in folders_in(storage, folder):
                if not kept.startswith(f"{folder}/{token}/"):
                    self._remove(storage, f"{folder}/{token}")

    def _remove(self, storage: Storage, folder: str) -> None:
        if try_to_remove(storage, folder):
            logger.info("files=%s removed: no job has them", folder)


def folders_in(storage: Storage, folder: str) -> list[str]:
    """Return the folders in one; none where it is gone or the storage cannot list."""
    try:
        return list(storage.listdir(folder)[0])
    except (FileNotFoundError, NotImplementedError):
        return []


def _old_uid(name: str) -> UUID | None:
    """Return the uid that a folder is named after if it is over a day old, else None."""
    try:
        uid = UUID(name)
    except ValueError:
        return None
    if str(uid) != name or uid.version != 7:
        return None
    made_at = (uid.int >> 80) / 1000  # RFC 9562, "UUID Version 7"
    return uid if made_at < time.time() - STRAY_SECONDS else None
