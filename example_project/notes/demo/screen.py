"""What the reader sees: lines, a progress bar, a table."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

from django.core.management.base import OutputWrapper

BAR_SECONDS = 0.1
# Where the output is kept, now and then is enough.
LINE_SECONDS = 2.0


class Screen:
    def __init__(self, out: OutputWrapper) -> None:
        self._out = out
        self._moves = out.isatty()
        self._shown_at = 0.0
        self._bar = ""

    def say(self, line: str = "") -> None:
        """Write a line above the bar."""
        self._wipe()
        self._out.write(line)

    def progress(self, done: int, total: int, note: str, *, now: bool = False) -> None:
        """Show a bar, in its place on a terminal, elsewhere a line of its own; not too often."""
        pause = BAR_SECONDS if self._moves else LINE_SECONDS
        if not now and time.monotonic() - self._shown_at < pause:
            return
        self._shown_at = time.monotonic()
        bar = _bar(done, total, note)
        if not self._moves:
            if bar != self._bar:
                self._out.write(bar)
            self._bar = bar
            return
        self._wipe()
        self._bar = bar[: shutil.get_terminal_size().columns - 1]
        self._out.write(self._bar, ending="")
        self._out.flush()

    def table(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Write rows of a name, a number and a remark."""
        names = max(len(name) for name, _, _ in rows)
        numbers = max(len(number) for _, number, _ in rows)
        for name, number, remark in rows:
            self.say(f"  {name:<{names}}  {number:>{numbers}}  {remark}".rstrip())

    def _wipe(self) -> None:
        if self._moves and self._bar:
            self._out.write("\r" + " " * len(self._bar) + "\r", ending="")
            self._bar = ""


def _bar(done: int, total: int, note: str, width: int = 24) -> str:
    part = done / total if total else 1.0
    filled = round(part * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {part:4.0%}  {note}"
