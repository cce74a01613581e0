"""A file that holds one line for each run of a job: how `manage.py demo` knows of runs.

What a handler writes here stays, also when its process is killed an instant later,
and whatever becomes of its transaction.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

VARIABLE = "NOTES_LEDGER"


def record(job_id: int) -> None:
    """Add a line to the file that the environment names; without one, do nothing."""
    if path := os.environ.get(VARIABLE):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, f"{job_id}\n".encode())  # one write, so that lines never mix
        finally:
            os.close(file)


def runs(path: Path) -> Counter[int]:
    """Return how often each job was run, by its id."""
    return Counter(int(line) for line in path.read_text().split()) if path.exists() else Counter()
