"""`ZipService`: files of storages in one archive, sound and safe to unpack everywhere."""

from __future__ import annotations

import errno
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from django.core.exceptions import SuspiciousOperation
from django.core.files.storage import Storage, storages
from django.utils import timezone
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from myxo_jobs.errors import GiveUp
from myxo_jobs.services.files import is_local
from myxo_jobs.services.service import JobService
from myxo_jobs.services.zip_names import ZipNames

if TYPE_CHECKING:
    from myxo_jobs.services.rows import ServiceJob

CHUNK_BYTES = 1024 * 1024
ARCHIVE = "files.zip"
MISSING = "MISSING.txt"
# Its names stay in the result up to so many bytes; all are in MISSING.txt.
MISSING_BYTES = 256 * 1024
MODE = (stat.S_IFREG | 0o644) << 16
UNIX = 3
UNKNOWN_TIME = (1980, 1, 1, 0, 0, 0)
YEARS = range(1980, 2108)
# Compressed already: deflating them takes time and saves nothing.
STORED = frozenset(
    (
        *("7z", "apk", "br", "bz2", "gz", "jar", "lz4", "rar", "tgz", "xz", "zip", "zst"),
        *("avif", "gif", "heic", "heif", "jpeg", "jpg", "png", "webp"),
        *("aac", "flac", "m4a", "mp3", "oga", "ogg", "opus"),
        *("avi", "m4v", "mkv", "mov", "mp4", "ogv", "webm"),
        *("docx", "epub", "odp", "ods", "odt", "pptx", "woff", "woff2", "xlsx"),
    )
)
# What opening and reading raise for a source that is not there, or not for us. Others, such as
# a network that is down, are errors of the attempt.
NOT_TO_BE_READ = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    SuspiciousOperation,
)


class ZipEntry(msgspec.Struct, frozen=True):
    """A file to put into the archive: its name in a storage, and in the archive."""

    source: str
    name: str = ""  # the last part of the source where it is empty
    storage: str = "default"


class ZipFiles(msgspec.Struct, frozen=True):
    """The payload of `ZipService`."""

    files: list[ZipEntry]
    missing: Literal["fail", "skip"] = "fail"


class Unreadable(Exception):  # noqa: N818 - named as a fact; it never leaves this module
    """A source that cannot go into the archive; the words say why, with a place for its name."""

    def __init__(self, words: str) -> None:
        self.words = words
        super().__init__(words)


class ZipService(JobService):
    """Writes storage files into one archive.

    Whoever builds the list decides what the asker may read. A subclass with a kind of its own
    and with `entries` looks the files up when it runs.
    """

    kind = "zip"
    title: ClassVar[str | Promise] = gettext_lazy("Zip file")
    payload_type: ClassVar[type[msgspec.Struct] | None] = ZipFiles
    # The aliases of STORAGES that sources may be in.
    storages: ClassVar[Sequence[str]] = ("default",)
    # What becomes of a source that cannot be read, where the payload does not say.
    missing: ClassVar[str] = "fail"

    def entries(self, job: ServiceJob) -> Iterable[ZipEntry]:
        """Yield what to put into the archive, in this order."""
        files: list[ZipEntry] = job.payload.files
        return files

    def process(self, job: ServiceJob) -> dict[str, Any]:
        entries = self.entries(job)
        missing = getattr(job.payload, "missing", self.missing)
        with (
            job.file(ARCHIVE) as f,
            zipfile.ZipFile(f, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            writing = _Writing(job, archive, f, self.storages, skips=missing == "skip")
            writing.total = writing.total_of(entries)
            for entry in entries:
                writing.add(entry)
            writing.tell_of_missing()
        result: dict[str, Any] = {
            "item_count": writing.count,
            "bytes_in": writing.done,
            "bytes_out": f.size,
        }
        if missing == "skip":
            result["missing"] = _first_of(writing.missing)
        return result


class _Writing:
    """An archive while it is written."""

    def __init__(
        self,
        job: ServiceJob,
        archive: zipfile.ZipFile,
        file: Any,
        allowed: Sequence[str],
        *,
        skips: bool,
    ) -> None:
        self.count = 0
        self.done = 0
        self.total: int | None = None
        self.missing: list[str] = []
        self._job = job
        self._archive = archive
        self._file = file
        self._sources = _Sources(allowed)
        self._names = ZipNames()
        # Taken first, so that it is the list of what is missing, whatever else is called so.
        self._list_name = self._names.take(MISSING) if skips else ""

    def total_of(self, entries: Iterable[ZipEntry]) -> int | None:
        """Return how many bytes a list has; None where asking takes a network, or it is no list."""
        if not isinstance(entries, (list, tuple)):
            return None
        total = 0
        for entry in entries:
            with suppress(Unreadable):
                if self._sources.storage_of(entry)[1] is None:
                    return None
                total += self._sources.size_of(entry)
        return total

    def add(self, entry: ZipEntry) -> None:
        name = self._names.take(entry.name or PurePosixPath(entry.source).name)
        start, done = self._archive.start_dir, self.done
        try:
            self._write(entry, name)
        except Unreadable as reason:
            if not self._list_name:
                raise GiveUp(reason.words % {"name": name}) from reason.__cause__
            self._take_back(name, start)
            self.done = done
            self.missing.append(name)
        else:
            self.count += 1

    def tell_of_missing(self) -> None:
        if self.missing:
            lines = "".join(f"{name}\n" for name in self.missing)
            self._archive.writestr(_info(self._list_name, None, None), lines)

    def _write(self, entry: ZipEntry, name: str) -> None:
        size = self._sources.size_of(entry)
        info = _info(name, size, self._sources.time_of(entry))
        read = 0
        with self._archive.open(info, "w") as target:
            for chunk in self._sources.chunks_of(entry):
                read += len(chunk)
                if read > size:
                    break
                target.write(chunk)
                self.done += len(chunk)
                self._job.progress(self.done, self.total, name)
        if read != size:
            raise Unreadable(_("“%(name)s” has changed while it was read."))

    def _take_back(self, name: str, start: int) -> None:
        """Leave out an entry that was begun: the next one is written over it."""
        if self._archive.filelist and self._archive.filelist[-1].filename == name:
            del self._archive.filelist[-1], self._archive.NameToInfo[name]
        self._archive.start_dir = start
        self._file.seek(start)
        self._file.truncate()


class _Sources:
    """The files that may go into an archive. Raises Unreadable for the others."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = allowed
        # The storage of an alias, and its folder where it is one of this machine.
        self._known: dict[str, tuple[Storage, Path | None]] = {}

    def storage_of(self, entry: ZipEntry) -> tuple[Storage, Path | None]:
        if entry.storage not in self._allowed:
            raise _refused()
        if entry.storage not in self._known:
            storage = storages[entry.storage]
            root = Path(storage.path("")).resolve() if is_local(storage) else None
            self._known[entry.storage] = storage, root
        return self._known[entry.storage]

    def size_of(self, entry: ZipEntry) -> int:
        """Return how long a source is; what may not be read is refused here."""
        storage, root = self.storage_of(entry)
        if not entry.source or "\x00" in entry.source:
            raise _refused()
        try:
            if root is not None:
                path = _followed(storage.path(entry.source))
                if not (path.is_relative_to(root) and path.is_file()):
                    raise _refused()
            return storage.size(entry.source)
        except NOT_TO_BE_READ as error:
            raise _gone_or_refused(error) from error
        except Unreadable:
            raise
        except Exception as error:
            if storage.exists(entry.source):
                raise
            raise _gone_or_refused(FileNotFoundError()) from error

    def time_of(self, entry: ZipEntry) -> datetime | None:
        """Return when a source was changed, in the job's zone; None where that is not known."""
        storage, _root = self.storage_of(entry)
        try:
            time = storage.get_modified_time(entry.source)
            return timezone.localtime(time) if timezone.is_aware(time) else time
        except (NotImplementedError, OSError, OverflowError, ValueError):
            return None

    def chunks_of(self, entry: ZipEntry) -> Iterator[bytes]:
        storage, _root = self.storage_of(entry)
        try:
            with storage.open(entry.source) as source:
                while chunk := source.read(CHUNK_BYTES):
                    yield chunk
        except NOT_TO_BE_READ as error:
            raise _gone_or_refused(error) from error


def _followed(path: str) -> Path:
    """Return a path with all links followed. Raises Unreadable where they lead nowhere."""
    try:
        return Path(path).resolve(strict=True)
    except RuntimeError as error:  # links in a circle, before Python 3.13
        raise _refused() from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise _refused() from error
        raise


def _refused() -> Unreadable:
    return Unreadable(_("“%(name)s” may not be read."))


def _gone_or_refused(error: Exception) -> Unreadable:
    if isinstance(error, FileNotFoundError):
        return Unreadable(_("“%(name)s” is missing."))
    return _refused()


def _info(name: str, size: int | None, time: datetime | None) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _zip_time(time))
    info.create_system = UNIX
    info.external_attr = MODE
    ending = name.rpartition(".")[2].lower()
    info.compress_type = zipfile.ZIP_STORED if ending in STORED else zipfile.ZIP_DEFLATED
    if size is not None:
        info.file_size = size  # by which ZIP64 is chosen
    return info


def _zip_time(time: datetime | None) -> tuple[int, int, int, int, int, int]:
    if time is None or time.year not in YEARS:
        return UNKNOWN_TIME
    return time.year, time.month, time.day, time.hour, time.minute, time.second


def _first_of(names: list[str]) -> list[str]:
    """Return as many names as a result has room for."""
    room = MISSING_BYTES
    for place, name in enumerate(names):
        room -= len(name.encode()) + 3
        if room < 0:
            return names[:place]
    return names
