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
from tests.benchmarks.evidence import RAN_FILE, Void, check_each_ran_once, written_down
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
    """Let workers run all, kill the busiest after a third; return the steps and the time.

    A step is a moment, and one run more or one fewer.
    """
    with tempfile.TemporaryDirectory(prefix="myxo-ran-") as folder, ExitStack() as stack:
        file = Path(folder, "ran")
        command = [sys.executable, "-m", "django", "runjobs", "--topics", "benchmark.limited"]
        workers = [
            stack.enter_context(
                program(command, until=" started using=", environment={RAN_FILE: str(file)})
            )
            for _ in range(WORKERS)
        ]
        _wait_for_ends(file, count // 3)
        killed, killed_at = _kill_one_that_runs(file, workers), time.monotonic()
        _wait_for_ends(file, count)
        ran = written_down(file)
    begins = [(number, at) for number, at in ran if number >= 0]
    ends = {-1 - number: at for number, at in ran if number < 0}
    check_each_ran_once([-1 - number for number, _ in ran if number < 0], range(count))
    # A run that was killed ended with its process; the last one of its job came through.
    last = dict(begins)
    steps = [(at, 1) for _, at in begins]
    steps += [(ends[number] if last[number] == at else killed_at, -1) for number, at in begins]
    if len(begins) == count:
        raise Void(f"nothing ran in process {killed} when it was killed")
    return sorted(steps), max(ends.values()) - min(at for _, at in begins)


def _kill_one_that_runs(file: Path, workers: Sequence[int]) -> int:
    """Kill a worker that is in the middle of a job; return its process number."""
    busy = written_down(Path(f"{file}.pids"))[-1][0]
    if busy not in workers:
        raise Void(f"process {busy} is none of the workers")
    os.kill(busy, signal.SIGKILL)
    return busy


def _wait_for_ends(file: Path, count: int) -> None:
    """Wait until so many jobs have ended."""
    deadline = time.monotonic() + 2 * count * LIMITED_SECONDS + 30
    while not file.exists() or sum(number < 0 for number, _ in written_down(file)) < count:
        if time.monotonic() > deadline:
            raise Void(f"fewer than {count} jobs have ended")
        time.sleep(0.02)
