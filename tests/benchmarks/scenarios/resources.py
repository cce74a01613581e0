"""What workers use beside time: memory, processes, flushes of the drive."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks import database, machine
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.drive import drive
from tests.benchmarks.evidence import (
    RAN_FILE,
    Void,
    check_each_ran_once,
    wait_for_jobs,
    written_down,
)
from tests.benchmarks.processes import Stage, ended, program, python_actor
from tests.benchmarks.reports import OURS, Report, at_most

RSS, GROWTH = "MiB", "MiB grown"
FIRST_JOBS, MORE_JOBS, AT_ONCE = 20_000, 200_000, 20_000
PROCESS_JOBS = 60_000
FLUSHED_JOBS = {"postgres": 5_000, "sqlite": 3_000}
BEYOND = "flushes a job"
TOPIC = "benchmark.written"
PATIENCE = 120.0
SHELL = "import time; print('waits', flush=True); time.sleep(600)"


@scenario(
    f"memory of `runjobs` after {FIRST_JOBS:,} jobs against a bare `manage.py shell`, and its "
    f"growth over {MORE_JOBS:,} more",
    postgres=[at_most(RSS, 1.6, "shell"), at_most(GROWTH, 5)],
    sqlite=[at_most(RSS, 1.6, "shell"), at_most(GROWTH, 5)],
)
def memory(bench: Bench, report: Report) -> None:
    more = bench.scaled(MORE_JOBS // AT_ONCE) * AT_ONCE
    for _ in range(bench.rounds):
        shell = [sys.executable, "-m", "django", "shell", "-c", SHELL]
        with program(shell, until="waits") as pid:
            report.add(RSS, "shell", machine.rss_mib(pid))
        database.empty()
        with _runjobs() as (pid, ran):
            _run_more(ran, 0, FIRST_JOBS)
            before = machine.rss_mib(pid)
            for first in range(FIRST_JOBS, FIRST_JOBS + more, AT_ONCE):
                _run_more(ran, first, AT_ONCE)
            report.add(RSS, OURS, before)
            report.add(GROWTH, OURS, machine.rss_mib(pid) - before)
            check_each_ran_once((n for n, _ in written_down(ran)), range(FIRST_JOBS + more))


def _run_more(ran: Path, first: int, count: int) -> None:
    from tests.benchmarks.jobs import Written, jobs

    jobs.put_many(Written(number) for number in range(first, first + count))
    wait_for_jobs(ran, first + count, within=PATIENCE)
    _wait_until_empty()


def _wait_until_empty() -> None:
    from myxo_jobs.models import Job

    deadline = time.monotonic() + PATIENCE
    while Job.objects.exists():
        if time.monotonic() > deadline:
            raise Void("the queue did not become empty")
        time.sleep(0.05)


@contextmanager
def _runjobs(*options: str) -> Iterator[tuple[int, Path]]:
    """Run `runjobs`; give its process number, and the file in which its handlers write."""
    with tempfile.TemporaryDirectory(prefix="myxo-ran-") as folder:
        ran = Path(folder, "ran")
        command = [sys.executable, "-m", "django", "runjobs", "--topics", TOPIC, *options]
        with program(command, until=" started using=", environment={RAN_FILE: str(ran)}) as pid:
            yield pid, ran


@scenario("no-op jobs a second of one `runjobs` with one and with two processes")
def processes(bench: Bench, report: Report) -> None:
    from tests.benchmarks.sides import ours

    count = bench.scaled(PROCESS_JOBS)
    for _ in range(bench.rounds):
        for number in (1, 2):
            database.empty()
            ours.fill("Written", count)
            with _runjobs("--processes", str(number)) as (_, ran):
                wait_for_jobs(ran, count, within=PATIENCE)
                _wait_until_empty()
                started = written_down(ran)
            check_each_ran_once([one for one, _ in started], range(count))
            moments = [moment for _, moment in started]
            side = f"{number} process{'es' if number > 1 else ''}"
            report.add("jobs/s", side, (count - 1) / (max(moments) - min(moments)))


@scenario(
    "flushes of the drive a job, beyond those of the same puts without a worker",
    postgres=[at_most(BEYOND, 0.05)],
    sqlite=[at_most(BEYOND, 0.05)],
)
def flushes(bench: Bench, report: Report) -> None:
    count = bench.scaled(FLUSHED_JOBS[bench.database])
    for _ in range(bench.rounds):
        with_worker = _flushes(bench, count, worker=True) / count
        alone = _flushes(bench, count, worker=False) / count
        report.add(BEYOND, OURS, with_worker - alone)
        report.add(BEYOND, "puts alone", alone)


def _flushes(bench: Bench, count: int, *, worker: bool) -> int:
    """Put so many jobs, one after the other, and return how often the drive was flushed."""
    database.empty()
    with Stage() as stage:
        drive_ = stage.enter_context(drive()) if bench.database == "sqlite" else None
        environment = drive_.environment if drive_ else {}
        flushed = drive_.flushes if drive_ else database.flushes
        arguments = {"request": "Noop", "first": 0, "count": count}
        putter = python_actor("sides.ours.put_all", environment, **arguments)
        working = python_actor("sides.ours.work", environment, topics=["benchmark.noop"])
        stage.begin(*([working] if worker else []))
        before = flushed()
        stage.perform(putter)
        if worker:
            _wait_until_empty()
        time.sleep(1.0)  # the server's statistics are that late
        after = flushed()
        if worker:
            check_each_ran_once(ended(working)["numbers"], range(count))
        else:
            stage.enter(working)
    return after - before
