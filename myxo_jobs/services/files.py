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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.files import File
from django.core.files.storage import Storage, storages
from django.db.models import Q

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
        # What is being stored, perhaps by a thread that outlives the attempt.
        self._unfinished: set[str] = set()
        self._is_over = False
        self._kept: str | None = None

    def file(self, name: str, *, text: bool) -> JobFile:
        """Return a file to write in a `with` block. Raises ValueError for a bad or used name."""
        if not is_file_name(name):
            raise ValueError(f"file takes the plain name of a file, not {name!r}")
        if name in self._begun:
            raise ValueError(f"this attempt has written a file {name!r} already")
        return JobFile(self, name, text=text)

    def store(self, name: str, content: File[bytes]) -> str:
        """Store a file; return its name in the storage."""
        wanted, size = f"{self.folder}/{name}", content.size
        self._begun.add(name)
        self._unfinished.add(wanted)
        if self._is_over:
            raise RuntimeError(f"file {name!r} comes too late: the attempt is over")
        stored = storages[self.storage].save(wanted, content)
        self.sizes[stored] = size
        self._unfinished.discard(wanted)
        # Asked after it is known: `end` meets it, or it is met here.
        if self._is_over:
            self._remove({stored})
        return stored

    def end(self, kept: str | None = None) -> None:
        """Remove all but the job's file, if there is one; what is stored later goes, too.

        What cannot be removed is logged, and left to the sweep.
        """
        self._kept, self._is_over = kept, True
        names = self._unfinished | set(self.sizes)
        names.discard(kept or "")
        if names:
            self._remove(names)

    def _remove(self, names: Iterable[str]) -> None:
        def remove() -> None:
            storage = storages[self.storage]
            if self._kept is None:
                remove_folder(storage, self.folder, names)
                return
            for name in names:
                storage.delete(name)

        try_to_remove(self.folder, remove)

    def older(self, *, is_first: bool) -> list[str]:
        """Return what earlier runs left: their workers have died, or could not wait for them.

        The first attempt may have been given back while it ran; for that a storage elsewhere
        is not asked at each start: the sweep does it. If the claim is still ours afterwards,
        no later run has left any of them.
        """
        folder, _, own = self.folder.rpartition("/")
        found: list[str] = []

        def look() -> None:
            storage = storages[self.storage]
            if not is_first or is_local(storage):
                found.extend(f"{folder}/{one}" for one in folders_in(storage, folder) if one != own)

        try_to_remove(folder, look)
        return found

    def remove_older(self, folders: Iterable[str]) -> None:
        """Remove folders that earlier runs left."""
        for folder in folders:
            try_to_remove(folder, partial(remove_folder, storages[self.storage], folder))


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

    def close(self) -> None:
        """Leave the file open: its block stores it. What wraps a file closes it when it is done."""
        if not self._file.closed:
            self._file.flush()

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


def remove_folder(
    storage: Storage,
    folder: str,
    names: Iterable[str] = (),
    may: Callable[[], bool] = lambda: True,
) -> None:
    """Remove a folder of ours with all that is in it; it may be gone already.

    `names`: files in it, for a storage that cannot list. Unless it `may`, which is asked once
    it is known what is in it: what a later run writes then stays. Raises what the storage
    raises.
    """
    try:
        folders, files = storage.listdir(folder)
    except FileNotFoundError:
        return
    except NotImplementedError:
        for name in names if may() else ():
            storage.delete(name)
        return
    if not may():
        return
    for name in files:
        storage.delete(f"{folder}/{name}")
    for name in folders:
        remove_folder(storage, f"{folder}/{name}")
    if is_local(storage):
        with suppress(OSError):  # somebody is faster, or writes into it again
            storage.delete(folder)


def try_to_remove(folder: str, remove: Callable[[], None]) -> bool:
    """Call what removes files of a folder; tell whether it could.

    What it raises is logged, and what it has not removed left to the sweep.
    """
    try:
        remove()
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


def remove_files_of(
    kind: str, uid: object, result: Any, storage: str, may: Callable[[], bool]
) -> None:
    """Remove all files of a job, in the storage that its result names and in the service's.

    `may` as for `remove_folder`.
    """
    told = result if isinstance(result, dict) else {}
    folder, theirs = folder_of(kind, uid), folder_of_file(told.get("file"), uid)
    places = {(storage, folder)}
    if theirs is not None:  # without a file, a service may tell of any storage it likes
        alias = str(told.get("storage") or storage)
        places |= {(alias, folder), (alias, theirs)}
    for alias, place in places:
        remove_folder(storages[alias], place, [told["file"]] if place == theirs else [], may)


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
        # When the jobs ended whose folders were found clean.
        self._clean: dict[UUID, datetime | None] = {}

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
        ended: dict[UUID, datetime | None] = {}
        for start in range(0, len(uids), CHUNK):
            ended |= self._sweep_chunk(storage, uids[start : start + CHUNK])
        # What is found once stays so: each is looked at once, and not too many at a time.
        self._clean = dict(self._clean.items() & ended.items())
        unknown = [uid for uid in ended if uid not in self._clean]
        self._sweep_ended(storage, {uid: ended[uid] for uid in unknown[:CHUNK]})

    def _sweep_chunk(self, storage: Storage, uids: list[UUID]) -> dict[UUID, datetime | None]:
        """Remove the folders without a row; return those whose jobs have ended, and when."""
        from myxo_jobs.services.rows import ServiceJob

        rows = ServiceJob.objects.filter(uid__in=uids)
        there = {uid: rest for uid, *rest in rows.values_list("uid", "status", "completed_at")}
        for uid in uids:
            if uid not in there:
                self._remove(storage, folder_of(self._kind, uid))
        return {uid: at for uid, (status, at) in there.items() if status in ("done", "failed")}

    def _sweep_ended(self, storage: Storage, ended: dict[UUID, datetime | None]) -> None:
        """Remove all but the jobs' files: a run may have left some, though its end was refused."""
        from myxo_jobs.services.rows import ServiceJob

        for uid, at in ended.items():
            folder = folder_of(self._kind, uid)
            tokens = folders_in(storage, folder)
            # Read once it is known what is there: what a retry of the job writes is not in it.
            rows = ServiceJob.objects.filter(uid=uid, completed_at=at)
            row = rows.filter(Q(failed=True) | Q(due=None)).only("topic", "result").first()
            if row is None:
                continue
            result = row.result if isinstance(row.result, dict) else {}
            kept = str(result.get("file", ""))
            clean = True
            for token in tokens:
                place = f"{folder}/{token}"
                if kept.startswith(f"{place}/"):
                    clean &= self._remove_others(storage, place, kept)
                else:
                    clean &= self._remove(storage, place)
            if clean:
                self._clean[uid] = at

    def _remove_others(self, storage: Storage, folder: str, kept: str) -> bool:
        def remove() -> None:
            for name in storage.listdir(folder)[1]:
                if f"{folder}/{name}" != kept:
                    storage.delete(f"{folder}/{name}")

        return try_to_remove(folder, remove)

    def _remove(self, storage: Storage, folder: str) -> bool:
        is_gone = try_to_remove(folder, lambda: remove_folder(storage, folder))
        if is_gone:
            logger.info("files=%s removed: no job has them", folder)
        return is_gone


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
