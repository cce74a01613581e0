"""Puts and runs at the same time."""

from __future__ import annotations

import time

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.evidence import Void, check_each_ran_once
from tests.benchmarks.processes import Stage, ended, python_actor
from tests.benchmarks.reports import OURS, RAW, Report, at_least, at_most, percentile
from tests.benchmarks.scenarios.drains import act
from tests.benchmarks.scenarios.latency import P50, P99, add_percentiles

PRODUCERS = 4
STEADY_SECONDS = 20
PUTS_A_SECOND = {"postgres": 1_000, "sqlite": 200}
ALL = {"postgres": 20_000, "sqlite": 4_000}
BACKLOG, RATE = "backlog at the end", "jobs/s"
ALONE = "puts alone"

STARVED_PUTS = 25
STARVED_PAUSE = 0.15
FULL = 500_000
STORM = 100_000
STARVED = ("full topic", "storm", "limit", "priority")
URGENT_FROM = 10_000_000
HORIZON_JOBS = 40_000
LAST = "jobs/s, last quarter"


@scenario(
    "four producers at 1,000 puts/s together (SQLite: 200), one worker process, "
    f"{STEADY_SECONDS} s a round: milliseconds from a put to its start",
    postgres=[
        at_most(P99, 50), at_most(BACKLOG, 50), at_least("puts/s", 990),
    ],
    sqlite=[
        at_most(P99, 100), at_most(BACKLOG, 20), at_least("puts/s", 198),
    ],
)  # fmt: skip
def steady(bench: Bench, report: Report) -> None:
    seconds = STEADY_SECONDS * bench.scale
    for _ in range(bench.rounds):
        database.empty()
        each = round(PUTS_A_SECOND[bench.database] * seconds / PRODUCERS)
        putters = [
            python_actor(
                "sides.ours.put_at_a_pace", {}, first=place * each, pauses=[seconds / each] * each
            )
            for place in range(PRODUCERS)
        ]
        worker = python_actor("sides.ours.work", {}, topics=["benchmark.timed"])
        with Stage() as stage:
            stage.begin(worker, *putters)
            puts = {number: moment for putter in putters for number, moment in putter.result()}
            stage.pause(3.0)
            starts = dict(ended(worker)["moments"])
        check_each_ran_once(list(starts), list(puts))
        add_percentiles(report, OURS, [(starts[n] - puts[n]) * 1e3 for n in puts])
        last_put = max(puts.values())
        report.add(BACKLOG, OURS, sum(start > last_put for start in starts.values()))
        report.add("puts/s", OURS, len(puts) / (last_put - min(puts.values())))


@scenario(
    f"the most that {PRODUCERS} producers and one worker hold together, to the last job's start; "
    "raw: the producers alone with bare INSERTs",
    postgres=[at_least(RATE, 4_000), at_least(RATE, 0.6, ALONE)],
    sqlite=[at_least(RATE, 1_000)],
)
def sustained(bench: Bench, report: Report) -> None:
    each = bench.scaled(ALL[bench.database] // PRODUCERS)
    for _ in range(bench.rounds):
        report.add(RATE, OURS, _put_all("ours", each, with_worker=True))
        report.add(RATE, ALONE, _put_all("ours", each, with_worker=False))
        report.add(RATE, RAW, _put_all("raw", each, with_worker=False))


def _put_all(side: str, each: int, *, with_worker: bool) -> float:
    """Let all producers put as quickly as they can; return the jobs a second."""
    from myxo_jobs.models import Job

    database.empty()
    count = each * PRODUCERS
    putters = [
        python_actor(f"sides.{side}.put_all", {}, first=place * each, count=each)
        for place in range(PRODUCERS)
    ]
    worker = python_actor("sides.ours.work", {}, topics=["benchmark.timed"])
    with Stage() as stage:
        stage.begin(*putters, *([worker] if with_worker else []))
        stage.enter(worker)
        results = [putter.result() for putter in putters]
        began = min(result["began"] for result in results)
        if not with_worker:
            return count / (max(result["ended"] for result in results) - began)
        deadline = time.monotonic() + 60
        while Job.objects.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        starts = ended(worker)["moments"]
    check_each_ran_once([number for number, _ in starts], range(count))
    return count / (max(moment for _, moment in starts) - began)


@scenario(
    "milliseconds from a put to its start (p99) beside work that never ends: a full topic, "
    "a topic whose jobs all fail, one whose jobs its limit blocks, a backlog of its own topic "
    "with a lower priority",
    postgres=[at_most(P99, 250, side=side) for side in STARVED],
    sqlite=[at_most(P99, 250, side=side) for side in STARVED],
)
def starvation(bench: Bench, report: Report) -> None:
    for _ in range(bench.rounds):
        _starve(bench, report, "full topic", "Noop", "benchmark.noop", FULL)
        _starve(bench, report, "storm", "Failing", "benchmark.failing", STORM)
        _starve(bench, report, "limit", "Blocked", "benchmark.blocked", STORM)
        _starve(bench, report, "priority", "Timed", "benchmark.timed", FULL, priority=5)


def _starve(
    bench: Bench, report: Report, side: str, request: str, topic: str, count: int, priority: int = 0
) -> None:
    from myxo_jobs.models import Job
    from tests.benchmarks.sides import ours

    database.empty()
    ours.fill(request, bench.scaled(count))
    worker = python_actor("sides.ours.work", {}, topics=[topic, "benchmark.timed"])
    putter = python_actor(
        "sides.ours.put_at_a_pace",
        {},
        first=URGENT_FROM,
        pauses=[STARVED_PAUSE] * bench.scaled(STARVED_PUTS),
        priority=priority,
    )
    with Stage() as stage:
        stage.begin(worker, putter)
        puts = dict(putter.result())
        there = Job.objects.filter(topic=topic).exists()
        stage.pause(1.0)
        starts = [(n, at) for n, at in ended(worker)["moments"] if n >= URGENT_FROM]
    if not there:
        raise Void(f"{side}: the backlog had ended before the puts did")
    check_each_ran_once([number for number, _ in starts], list(puts))
    taken = [(at - puts[number]) * 1e3 for number, at in starts]
    report.add(P50, side, percentile(taken, 0.5))
    report.add(P99, side, percentile(taken, 0.99))


@scenario(
    f"jobs a second over {HORIZON_JOBS:,} jobs while another session holds an old snapshot",
    postgres=[at_least(RATE, 0.6, "undisturbed"), at_least(LAST, 0.6, "undisturbed")],
    sqlite=None,
)
def horizon(bench: Bench, report: Report) -> None:
    count = bench.scaled(HORIZON_JOBS)
    for _ in range(bench.rounds):
        for side in (OURS, "undisturbed"):
            database.empty()
            with Stage() as stage:
                if side == OURS:
                    stage.enter_context(_old_snapshot())
                moments = _drain_timed(count)
            last = moments[-(count // 4) :]
            report.add(RATE, side, (count - 1) / (moments[-1] - moments[0]))
            report.add(LAST, side, (len(last) - 1) / (last[-1] - last[0]))


def _old_snapshot() -> Stage:
    """Open a transaction that keeps the server from cleaning up; it lasts until the exit."""
    import psycopg

    holder = Stage()
    session = holder.enter_context(psycopg.connect(_dsn(), autocommit=True))
    session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    session.execute("SELECT count(*) FROM notes_note")
    return holder


def _dsn() -> str:
    from django.db import connection
    from psycopg.conninfo import make_conninfo

    given = connection.get_connection_params()
    names = ("dbname", "user", "password", "host", "port")
    return make_conninfo(**{name: given[name] for name in names if given.get(name)})


def _drain_timed(count: int) -> list[float]:
    """Fill the queue and let one worker empty it; return when each job started."""
    from tests.benchmarks.sides import ours

    ours.fill("Timed", count)
    result = act("sides.ours.drain", topic="benchmark.timed", count=count)
    check_each_ran_once(result["numbers"], range(count))
    return [moment for _, moment in result["moments"]]
