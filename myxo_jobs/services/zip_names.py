"""Names in an archive: safe on every system, and distinct on every system."""

from __future__ import annotations

import re
import unicodedata

from myxo_jobs.services.names import cut_name, is_wanted

# A name has less than 65,536 bytes (APPNOTE.TXT, "file name length"), and paths have limits
# that are much lower.
LONGEST_NAME_BYTES = 4_000
DRIVE = re.compile(r"^[A-Za-z]:")
# What Windows takes in no name.
FORBIDDEN = str.maketrans(dict.fromkeys('<>:"|?*', "_"))
# Names of devices, whatever their extension (Microsoft, "Naming Files, Paths, and Namespaces").
RESERVED = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{device}{number}" for device in ("com", "lpt") for number in "0123456789¹²³"]
)
NAMELESS = "file"


def safe_name(name: str) -> str:
    """Return a name that unpacks inside the target folder, on every system."""
    parts = DRIVE.sub("", name).replace("\\", "/").split("/")
    safe = [part for part in map(_safe_part, parts) if part] or [NAMELESS]
    while len("/".join(safe).encode()) > LONGEST_NAME_BYTES:
        del safe[0]
    return "/".join(safe)


def _safe_part(part: str) -> str:
    part = "".join(character for character in part if is_wanted(character))
    part = cut_name(part.translate(FORBIDDEN).strip().rstrip(". ")).rstrip(". ")
    if part.partition(".")[0].rstrip().lower() in RESERVED:
        part = cut_name(f"_{part}").rstrip(". ")
    return part


def _same(name: str) -> str:
    """Return what two names have in common that some system takes for one."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


class ZipNames:
    """The names of one archive: no two are one, also ignoring case and Unicode form."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._numbers: dict[str, int] = {}

    def take(self, name: str) -> str:
        """Return the name of a new entry: the safe one, with a number where it is taken."""
        *folders, last = safe_name(name).split("/")
        path = ""
        for folder in folders:
            path += self._free(path, folder, self._files)  # a file is no folder, too
            self._folders.add(_same(path))
            path += "/"
        taken = path + self._free(path, last, self._files, self._folders)
        self._files.add(_same(taken))
        return taken

    def _free(self, path: str, part: str, *taken: set[str]) -> str:
        """Return the part of a name, numbered until the whole stands in none of the sets."""
        free, wanted = part, _same(path + part)
        while any(_same(path + free) in names for names in taken):
            number = self._numbers.get(wanted, 1) + 1
            self._numbers[wanted] = number
            free = cut_name(part, f" ({number})")
        return free
