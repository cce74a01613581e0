"""A queue in an SQLite file beside the project's own writes, on a slow drive."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.drive import Drive, drive
from tests.benchmarks.evidence import check_each_ran_once
from tests.benchmarks.processes import Actor, Stage, ended, python_actor
from tests.benchmarks.reports import OURS, Report, at_least, at_most, percentile

FLUSH_MILLISECONDS = 10.0
REFERENCE = "a flush at each step"
WORKERS = {OURS: "sides.ours.work", REFERENCE: "sides.raw.work_sqlite"}
#: (jobs, other writes) a second.
MIXES = ((25, 10), (10, 50))
SECONDS = 12
STEPS = (10, 25, 40, 55, 70, 85)
STEP_SECONDS = 6
ALONE_JOBS = 300
#: How long a caller beyond the limit waits for the lock; the settings' 20 s would show nothing.
SHORT_TIMEOUT = 1
CROWD = 6
ERRORS, P95, ALONE = "errors beyond the reference", "p95 ms", "jobs/s, alone"


class Outcome(msgspec.Struct, frozen=True):
    """What became of a while of puts beside writes: errors of both, and each job's wait.

    `behind` is how many seconds the last put or write was late.
    """

    errors: int
    waits: Sequence[float]
    behind: float

    @property
    def p95(self) -> float:
        return percentile(self.waits, 0.95)


@scenario(
    f"a queue beside other writes, on a drive that takes {FLUSH_MILLISECONDS:g} ms a flush",
    postgres=None,
    sqlite=[
        *(at_most(f"{ERRORS}, {jobs} beside {writes}", 0) for jobs, writes in MIXES),
        *(at_most(f"{P95}, {jobs} beside {writes}", 1000) for jobs, writes in MIXES),
        at_least(ALONE, 2.5, REFERENCE),
        at_least("puts refused beyond the limit", 1),
        at_most("accepted jobs lost", 0),
    ],
)
def sqlite_beside(bench: Bench, report: Report) -> None:
    with drive(FLUSH_MILLISECONDS) as slow:
        for _ in range(bench.rounds):
            for mix in MIXES:
                _measure_mix(slow, report, mix, SECONDS * bench.scale)
            for side in WORKERS:
                report.add(ALONE, side, _alone(slow, side, bench.scaled(ALONE_JOBS)))
        for _, writes in MIXES:
            held = _most_held(slow, writes, STEP_SECONDS * bench.scale)
            report.add(f"jobs/s held beside {writes} writes/s", OURS, held)
        _beyond_the_limit(slow, report, STEP_SECONDS * bench.scale)


def _measure_mix(slow: Drive, report: Report, mix: tuple[int, int], seconds: float) -> None:
    outcomes = {side: _beside(slow, side, mix, seconds) for side in WORKERS}
    words = f"{mix[0]} beside {mix[1]}"
    report.add(f"{ERRORS}, {words}", OURS, outcomes[OURS].errors - outcomes[REFERENCE].errors)
    for side, outcome in outcomes.items():
        report.add(f"{P95}, {words}", side, outcome.p95)


def _beside(slow: Drive, side: str, mix: tuple[int, int], seconds: float) -> Outcome:
    """Put jobs at a rate beside writes at a rate, with a worker, and compare all of them."""
    database.empty()
    jobs, writes = mix
    worker = python_actor(WORKERS[side], slow.environment, topics=["benchmark.timed"])
    putter = python_actor(
        "sides.ours.put_beside", slow.environment, first=0, rate=jobs, seconds=seconds
    )
    writer = python_actor("sides.ours.write_beside", slow.environment, rate=writes, seconds=seconds)
    return _together(worker, [putter], [writer])


def _together(worker: Actor, putters: Sequence[Actor], writers: Sequence[Actor]) -> Outcome:
    with Stage() as stage:
        stage.begin(worker, *putters, *writers)
        put = [putter.result() for putter in putters]
        wrote = [writer.result() for writer in writers]
        _wait_until_empty()
        worked = ended(worker)
    puts = {number: moment for one in put for number, moment in one["moments"]}
    starts = worked["moments"]
    check_each_ran_once([number for number, _ in starts], list(puts))
    errors = sum(one["errors"] for one in (*put, *wrote)) + worked.get("errors", 0)
    behind = max(one["behind"] for one in (*put, *wrote))
    return Outcome(errors, [(moment - puts[number]) * 1e3 for number, moment in starts], behind)


def _wait_until_empty(within: float = 30.0) -> None:
    from myxo_jobs.models import Job

    deadline = time.monotonic() + within
    while Job.objects.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _alone(slow: Drive, side: str, count: int) -> float:
    """Put so many jobs as quickly as it goes, nobody else writing; return the jobs a second."""
    database.empty()
    worker = python_actor(WORKERS[side], slow.environment, topics=["benchmark.timed"])
    arguments = {"request": "Timed", "first": 0, "count": count}
    putter = python_actor("sides.ours.put_all", slow.environment, **arguments)
    with Stage() as stage:
        stage.begin(worker, putter)
        began = putter.result()["began"]
        _wait_until_empty()
        starts = ended(worker)["moments"]
    check_each_ran_once([number for number, _ in starts], range(count))
    return count / (max(moment for _, moment in starts) - began)


def _most_held(slow: Drive, writes: int, seconds: float) -> float:
    """Return the highest of some rates at which nothing fails or falls behind by a second.

    Nor do more than 5 of 100 jobs wait for a second.
    """
    held = 0
    for rate in STEPS:
        outcome = _beside(slow, OURS, (rate, writes), seconds)
        if outcome.errors or outcome.behind > 1 or outcome.p95 > 1000:
            break
        held = rate
    return held


def _beyond_the_limit(slow: Drive, report: Report, seconds: float) -> None:
    """Let far more write than the file can take: puts fail in the caller, no other job is lost."""
    database.empty()
    hurried = slow.environment | {"MYXO_BENCHMARK_TIMEOUT": str(SHORT_TIMEOUT)}
    worker = python_actor(WORKERS[OURS], slow.environment, topics=["benchmark.timed"])
    putters = [
        python_actor(
            "sides.ours.put_beside", hurried, first=place * 100_000, rate=200, seconds=seconds
        )
        for place in range(CROWD)
    ]
    writers = [
        python_actor("sides.ours.write_beside", hurried, rate=200, seconds=seconds)
        for _ in range(CROWD)
    ]
    outcome = _together(worker, putters, writers)  # void if an accepted job was lost
    report.add("puts refused beyond the limit", OURS, outcome.errors)
    report.add("accepted jobs lost", OURS, 0)
