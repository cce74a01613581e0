"""huey in an SQLite file that flushes each commit to the drive, and keeps no results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from huey import SqliteHuey

from tests.benchmarks.evidence import write_down

queue: Any = SqliteHuey(filename=os.environ["MYXO_PEER_DATABASE"], fsync=True, results=False)


@queue.task()
def noop(number: int) -> None:
    write_down(number)


def install() -> None:
    """Nothing to do: its tables are made when it is opened."""


def enqueue(number: int) -> None:
    noop(number)


def enqueue_all(numbers: Iterable[int]) -> None:
    for number in numbers:
        noop(number)
