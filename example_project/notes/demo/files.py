"""The texts of a folder, and their words counted without the queue."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import django
import msgspec

SUFFIXES_OF_DJANGO = (".py", ".txt", ".html", ".po")
LARGEST_BYTES = 16 * 1024 * 1024
# A file with a NUL near its beginning is no text: git's rule, too.
BEGINNING_BYTES = 8 * 1024
LONGEST_NAME = 200


class TextFile(msgspec.Struct, frozen=True):
    """A file as it becomes a note."""

    name: str
    text: str
    words: int


def paths_in(folder: Path | None) -> list[Path]:
    """Return the files of a folder, hidden ones left out; without one, Django's own texts."""
    if folder is None:
        django_itself = Path(django.__file__).parent
        return [path for path in _walk(django_itself) if path.suffix in SUFFIXES_OF_DJANGO]
    return list(_walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(here, name)
            if not name.startswith(".") and path.is_file():
                yield path


def read(path: Path) -> TextFile | None:
    """Return the text of a file; None for one that cannot be read, is too large or no text."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    if b"\x00" in content[:BEGINNING_BYTES]:
        return None
    # PostgreSQL stores no NUL in a text.
    text = content.decode(errors="replace").replace("\x00", "\ufffd")
    return TextFile(_name(path), text, count_words(content))


def count_words(content: bytes) -> int:
    """Count the words another way than the job does: from the bytes, by a pattern."""
    return sum(1 for _ in re.finditer(r"\S+", content.decode(errors="replace")))


def _name(path: Path) -> str:
    """Return the path as text that fits a title and a key, different for each path."""
    raw = os.fsencode(path)
    name = raw.decode(errors="replace")
    if len(name) <= LONGEST_NAME and os.fsencode(name) == raw:
        return name
    return f"…{name[-LONGEST_NAME:]} {hashlib.sha256(raw).hexdigest()[:16]}"
