"""A topic with a `limit`: how well its slots are used by several worker processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.evidence import RAN_FILE, Void, written_down
from tests.benchmarks.jobs import LIMIT, LIMITED_SECONDS
from tests.benchmarks.processes import program
from tests.benchmarks.reports import OURS, Report, at_most

JOBS = 200
WORKERS = 3
AT_ONCE, IDEAL = "at once", "× the ideal time"


@scenario(
    f"{JOBS} jobs of {LIMITED_SECONDS:g} s under limit={LIMIT} in {WORKERS} worker processes, "
    "one of which is killed on the way",
    postgres=[at_most(AT_ONCE, LIMIT), at_most(IDEAL, 1.15)],
    sqlite=[at_most(AT_ONCE, LIMIT), at_most(IDEAL, 1.15)],
)
def limited(bench: Bench, report: Report) -> None:
    from tests.benchmarks.sides import ours

    count = bench.scaled(JOBS)
    for _ in range(bench.rounds):
        database.empty()
        ours.fill("Limited", count)
        steps, seconds = _run_and_kill_one(count)
        report.add(AT_ONCE, OURS, max(accumulate(step for _, step in steps)))
        report.add(IDEAL, OURS, seconds / (count * LIMITED_SECONDS / LIMIT))


def _run_and_kill_one(count: int) -> tuple[list[tuple[float, int]], float]:
    """Let workers run all, and kill one that is busy after a third; return steps and time.

    A step is a moment, and one run more or one fewer.
    """
    with tempfile.TemporaryDirectory(prefix="myxo-ran-") as folder, ExitStack() as stack:
        command = [sys.executable, "-m", "django", "runjobs", "--topics", "benchmark.limited"]
        files = [Path(folder, str(place)) for place in range(WORKERS)]
        workers = {}
        for file in files:
            environment = {RAN_FILE: str(file)}
            one = program(command, until=" started using=", environment=environment)
            workers[file] = stack.enter_context(one)
        _wait_for_ends(files, count // 3)
        time.sleep(LIMITED_SECONDS / 2)
        killed = max(files, key=lambda file: sum(step for _, _, step in _steps(file)))
        os.kill(workers[killed], signal.SIGKILL)
        killed_at = time.monotonic()
        _wait_for_ends(files, count)
        by_file = {file: _steps(file) for file in files}
    broken_off = sum(step for _, _, step in by_file[killed])
    if not broken_off:
        raise Void("the worker that was killed ran nothing at that moment")
    steps = [(at, step) for steps in by_file.values() for at, _, step in steps]
    seconds = max(steps)[0] - min(steps)[0]
    return sorted([*steps, *[(killed_at, -1)] * broken_off]), seconds


def _steps(file: Path) -> list[tuple[float, int, int]]:
    """Return the moments of a worker, their jobs, and whether a run began (1) or ended (-1)."""
    ran = written_down(file) if file.exists() else []
    return [(at, n, 1) if n >= 0 else (at, -1 - n, -1) for n, at in ran]


def _wait_for_ends(files: Sequence[Path], count: int) -> None:
    """Wait until so many jobs have ended."""
    deadline = time.monotonic() + 2 * count * LIMITED_SECONDS + 30
    while len({job for file in files for _, job, step in _steps(file) if step < 0}) < count:
        if time.monotonic() > deadline:
            raise Void(f"fewer than {count} jobs have ended")
        time.sleep(0.02)
