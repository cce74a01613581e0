"""What the run has to know of a queue, and the job that all of them run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests import ledger

SECONDS = 0.05
PROCESSES = 4


class Peer(msgspec.Struct, frozen=True):
    """How to start its workers, how to put a job, and which processes to kill."""

    what: str
    put: Callable[[int], object]
    # Arguments of `manage.py`.
    command: tuple[str, ...]
    # How many times it is started.
    times: int = PROCESSES
    # The worker processes of one such process.
    workers: Callable[[int], list[int]] = lambda pid: [pid]


def handle(number: int) -> None:
    """Do the work of a job, and tell the ledger."""
    ledger.write("begin", name=str(number))
    time.sleep(SECONDS)
    ledger.write("end", name=str(number))


def children(pid: int) -> list[int]:
    """Return the children of a process, the oldest first; none if it has ended."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []
