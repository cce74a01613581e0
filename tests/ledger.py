"""What handlers did, written so that it survives the kill of whoever wrote it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

#: Names the file, for this process and for the workers that a test starts.
VARIABLE = "MYXO_TEST_LEDGER"


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing a handler did: `begin`, `end`, or a word of its own."""

    event: str
    name: str = ""
    job: int = 0
    attempt: int = 0
    pid: int = 0
    at: float = 0.0  # seconds of CLOCK_MONOTONIC, which all processes share
    value: Any = None


def write(event: str, *, name: str = "", job: int = 0, attempt: int = 0, value: Any = None) -> None:
    """Append a line to the test's ledger, with one write to an O_APPEND file."""
    line = Line(event, name, job, attempt, os.getpid(), time.monotonic(), value)
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)


class Ledger:
    """The ledger as a test reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def lines(self, event: str | None = None, *, name: str | None = None) -> list[Line]:
        """Return the lines so far, in the order of writing, of one event or name if given."""
        lines = [
            msgspec.json.decode(line, type=Line) for line in self._path.read_bytes().splitlines()
        ]
        return [line for line in lines if event in (None, line.event) and name in (None, line.name)]

    def count(self, event: str, *, name: str | None = None) -> int:
        return len(self.lines(event, name=name))
