"""What the run has to know of a queue, and the job that all of them run."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import psutil

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
    workers: Callable[[psutil.Process], list[int]] = lambda process: [process.pid]


def handle(number: int) -> None:
    """Do the work of a job, and tell the ledger."""
    ledger.write("begin", name=str(number))
    time.sleep(SECONDS)
    ledger.write("end", name=str(number))


def children(process: psutil.Process) -> list[int]:
    return [child.pid for child in process.children()]
