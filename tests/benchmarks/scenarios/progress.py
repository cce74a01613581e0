"""A service that tells of its progress in a tight loop: what a call costs, and what is written."""

from __future__ import annotations

import sys
import time

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.evidence import Void
from tests.benchmarks.jobs import CALLS
from tests.benchmarks.processes import program
from tests.benchmarks.reports import OURS, Report, at_most

PATIENCE = 120.0
LOOK_SECONDS = 0.02
CALL, WRITES = "µs a call", "writes/s"
MARKS = [at_most(CALL, 1), at_most(WRITES, 2)]


@scenario(
    f"a service that calls `job.progress` {CALLS:,} times in a loop",
    postgres=MARKS,
    sqlite=MARKS,
)
def progress(bench: Bench, report: Report) -> None:
    command = [sys.executable, "-m", "django", "runjobs", "--topics", "benchmark.count"]
    with program(command, until=" started using="):
        for _ in range(bench.rounds):
            database.empty()
            _measure(bench.scaled(CALLS), report)


def _measure(calls: int, report: Report) -> None:
    from myxo_jobs.services import enqueue, get_job

    uid = enqueue("benchmark.count", {"calls": calls})
    deadline = time.monotonic() + PATIENCE
    # Each write stands for half a second, so looks that are much denser see them all.
    seen = set()
    while (job := get_job(uid)) is None or job.status not in ("done", "failed"):
        if time.monotonic() > deadline:
            raise Void("the service did not end in time")
        if job is not None and job.progress_done is not None:
            seen.add(job.progress_done)
        time.sleep(LOOK_SECONDS)
    if job.status != "done" or job.progress_done != calls - 1:
        raise Void(f"the service ended {job.status} at {job.progress_done}: {job.error}")
    seconds = float(job.result)
    report.add(CALL, OURS, seconds / calls * 1e6)
    report.add(WRITES, OURS, len(seen - {job.progress_done}) / seconds)
