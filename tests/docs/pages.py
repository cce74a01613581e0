"""The pages of the docs, and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.rig import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BY_HAND = re.compile(r"^<!-- by hand: (.+) -->$", re.MULTILINE)
_FILE = re.compile(r"(?:# |\{# )([\w/]+\.\w+)(?: #\})?\n")


class Block(msgspec.Struct, frozen=True):
    """A code block, or, in the language `by hand`, something that the reader does."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file it belongs into, named by its first line."""
        match = _FILE.match(self.text)
        return match[1] if match else None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    found = [(match.start(), match[1], match[2]) for match in _BLOCK.finditer(text)]
    found += [(match.start(), "by hand", match[1]) for match in _BY_HAND.finditer(text)]
    return [
        Block(page, text.count("\n", 0, start) + 1, language, content)
        for start, language, content in sorted(found)
    ]


def blocks(*languages: str) -> Iterator[Block]:
    """Yield the blocks of all pages that are in these languages."""
    for page in PAGES:
        yield from (block for block in blocks_of(page) if block.language in languages)


def code_in(page: Path) -> set[str]:
    """Return what stands in single backquotes on a page."""
    return set(re.findall(r"`([^`\n]+)`", page.read_text()))


def section(page: Path, heading: str) -> str:
    """Return what stands below a heading, up to the next one."""
    text = page.read_text()
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert start, f"{page.name} has no heading {heading!r}"
    return re.split(r"^#+ ", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(page: Path, heading: str) -> list[str]:
    """Return what the rows below a heading have in their first cell, in backquotes."""
    cells = re.findall(r"^\| ([^|]+?) \|", section(page, heading), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
