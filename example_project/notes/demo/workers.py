"""A worker: a real `manage.py runjobs` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from django.conf import settings

from example_project.notes import ledger

START_SECONDS = 30
STOP_SECONDS = 30
LAST_CHARACTERS = 4_000


class Worker:
    """Runs from its making until it is stopped or killed, at the latest when its block ends."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self._log = folder / f"worker-{number}.log"
        environment = os.environ | {
            "DATABASE_URL": url,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            ledger.VARIABLE: str(folder / "ledger"),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "manage.py", "runjobs"],
                cwd=settings.BASE_DIR,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the end of what it wrote."""
        return self._log.read_text(errors="replace")[-LAST_CHARACTERS:]

    def kill_while(self, is_busy: Callable[[], bool]) -> bool:
        """Kill the process, unless it has no work in its hands just now; tell whether.

        It is held still for the look: the kill of an idle worker would prove nothing.
        """
        if hasattr(signal, "SIGSTOP"):
            self._process.send_signal(signal.SIGSTOP)
        if not is_busy():
            if hasattr(signal, "SIGCONT"):
                self._process.send_signal(signal.SIGCONT)
            return False
        self._process.kill()
        self._process.wait()
        return True

    def stop(self) -> int | None:
        """Ask the process to end; return its exit status, None when it did not end in time."""
        self._wait_until_started()  # before that, the signal would just kill it
        self._process.terminate()
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.is_running and time.monotonic() < deadline:
            if b" started " in self._log.read_bytes():
                return
            time.sleep(0.05)
