"""What a worker costs that has nothing to do."""

from __future__ import annotations

import sys
import time

from django.db import connection

from tests.benchmarks import database, machine
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.processes import program
from tests.benchmarks.reports import OURS, Report, at_most

SECONDS = 15
TOPICS = "benchmark.noop,benchmark.timed,benchmark.orm,benchmark.async,benchmark.atomic"
CPU, STATEMENTS, WRITTEN = "% of a core", "statements/s", "bytes written/s"


@scenario(
    "an idle `runjobs` that serves five topics",
    postgres=[at_most(CPU, 0.5), at_most(STATEMENTS, 2), at_most(WRITTEN, 0)],
    sqlite=[at_most(CPU, 0.5), at_most(WRITTEN, 0)],
)
def idle(bench: Bench, report: Report) -> None:
    database.empty()
    command = [sys.executable, "-m", "django", "runjobs", "--topics", TOPICS]
    with program(command, until=" started using=") as pid:
        time.sleep(6)  # the listener proves itself, and the imports are forgotten
        for _ in range(bench.rounds):
            _measure(pid, bench.scaled(SECONDS), report)


def _measure(pid: int, seconds: float, report: Report) -> None:
    is_postgres = connection.vendor == "postgresql"
    activity = database.Activity() if is_postgres else None
    cpu, written = machine.cpu_seconds(pid), machine.written_bytes(pid)
    began = time.monotonic()
    time.sleep(seconds)
    taken = time.monotonic() - began
    report.add(CPU, OURS, (machine.cpu_seconds(pid) - cpu) / taken * 100)
    if activity is not None:
        did = activity.since()
        report.add(STATEMENTS, OURS, (did["transactions"] - 1) / taken)
        report.add("server's log bytes/s", OURS, did["wal"] / taken)
    report.add(WRITTEN, OURS, (machine.written_bytes(pid) - written) / taken)
