"""Names of files: what is one, and how any text is made one."""

from __future__ import annotations

import unicodedata

NAME_BYTES = 255
# A longer ending is no extension.
EXTENSION_BYTES = 32
PATH_CHARACTERS = "/\\"
# Characters that turn the direction of what follows: `gpj.exe` could read `exe.jpg`.
BIDIRECTIONAL = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
# Controls, surrogates, and the separators of lines and paragraphs.
UNWANTED = frozenset(("Cc", "Cs", "Zl", "Zp"))


def is_wanted(character: str) -> bool:
    return character not in BIDIRECTIONAL and unicodedata.category(character) not in UNWANTED


def clean_name(name: str) -> str:
    """Return a text as the name of a file, its extension kept; empty if nothing is left.

    Without control, bidirectional and path characters, at most 255 bytes.
    """
    cleaned = "".join(character for character in name if is_wanted(character))
    for character in PATH_CHARACTERS:
        cleaned = cleaned.replace(character, "_")
    return cut_name(cleaned.strip().lstrip(".").rstrip(". "))


def cut_name(name: str, extra: str = "") -> str:
    """Return a name of at most 255 bytes, `extra` put before its extension."""
    stem, dot, ending = name.rpartition(".")
    if not stem or len(ending.encode()) > EXTENSION_BYTES:
        stem, dot, ending = name, "", ""
    tail = f"{extra}{dot}{ending}"
    return cut_text(stem, NAME_BYTES - len(tail.encode())) + tail


def cut_text(text: str, most: int) -> str:
    """Return the beginning of a text that has at most so many bytes, whole characters."""
    return text.encode()[:most].decode(errors="ignore")


def is_file_name(name: object) -> bool:
    """Tell whether this is the plain name of a file, that any storage takes."""
    return isinstance(name, str) and bool(name) and clean_name(name) == name
