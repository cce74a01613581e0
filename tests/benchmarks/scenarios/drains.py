"""How quickly a queue that is full is emptied by one worker process."""

from __future__ import annotations

from typing import Any

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.evidence import check_each_ran_once, wait_for_jobs, written_down
from tests.benchmarks.peers import Peer, contestants, left_out_if_void
from tests.benchmarks.processes import Stage, python_actor
from tests.benchmarks.reports import DJANGO_PEERS, OURS, PEERS, RAW, Report, at_least

JOBS = 100_000
SLOW_JOBS = 8_000
PEER_PATIENCE = 60.0
RATE = "jobs/s"
#: Of the process that drains, without the server's.
CPU = "µs of CPU a job"


@scenario(
    "no-op jobs a second, one worker process",
    postgres=[
        at_least(RATE, 0.5, RAW),
        at_least(RATE, 2.5, "pgqueuer"),
        at_least(RATE, 30, DJANGO_PEERS),
        at_least(RATE, 1, "Graphile Worker"),
    ],
    sqlite=[at_least(RATE, 0.3, RAW), at_least(RATE, 8, "huey"), at_least(RATE, 1, PEERS)],
)
def drain(bench: Bench, report: Report) -> None:
    count = bench.scaled(JOBS)
    for _ in range(bench.rounds):
        drain_ours(report, OURS, "Noop", "benchmark.noop", count)
        drain_raw(report, "drain", count)
        for peer in contestants(bench, variants=True):
            with left_out_if_void(report, peer):
                report.add(RATE, peer.name, drain_peer(peer, bench))


@scenario(
    "jobs a second whose handler does one ORM update, one slot; raw: a loop of the updates",
    postgres=[at_least(RATE, 0.7, RAW)],
    sqlite=[at_least(RATE, 0.7, RAW)],
)
def drain_orm(bench: Bench, report: Report) -> None:
    count = bench.scaled(SLOW_JOBS)
    for _ in range(bench.rounds):
        drain_ours(report, OURS, "UpdateNote", "benchmark.orm", count)
        _add(report, RAW, count, act("sides.raw.drain_orm", count=count))


@scenario(
    "atomic jobs a second that update one row, one slot; raw: begin, update, delete, commit",
    postgres=[at_least(RATE, 0.6, RAW)],
    sqlite=[at_least(RATE, 0.5, RAW)],
)
def drain_atomic(bench: Bench, report: Report) -> None:
    count = bench.scaled(SLOW_JOBS)
    for _ in range(bench.rounds):
        drain_ours(report, OURS, "UpdateAtomically", "benchmark.atomic", count)
        drain_raw(report, "drain_atomic", count)


@scenario(
    "no-op async jobs a second, 100 slots; beside `drain` in the same run",
    postgres=[at_least(RATE, 0.5, "drain")],
)
def drain_async(bench: Bench, report: Report) -> None:
    count = bench.scaled(JOBS)
    for _ in range(bench.rounds):
        drain_ours(report, OURS, "AsyncNoop", "benchmark.async", count)
        drain_ours(report, "drain", "Noop", "benchmark.noop", count)


@scenario(
    "no-op jobs a second that are kept with their result; beside `drain` in the same run",
    postgres=[at_least(RATE, 0.2, "drain")],
    sqlite=[at_least(RATE, 0.2, "drain")],
)
def drain_kept(bench: Bench, report: Report) -> None:
    count = bench.scaled(JOBS)
    for _ in range(bench.rounds):
        drain_ours(report, OURS, "KeptNoop", "benchmark.kept", count)
        drain_ours(report, "drain", "Noop", "benchmark.noop", count)


def act(function: str, **arguments: Any) -> Any:
    """Let one actor do its part alone; return what it measured."""
    with Stage() as stage:
        return stage.perform(python_actor(function, {}, **arguments))[0]


def drain_ours(report: Report, side: str, request: str, topic: str, count: int) -> None:
    """Fill the queue and let a worker empty it."""
    from tests.benchmarks.sides import ours

    database.empty()
    ours.fill(request, count)
    result = act("sides.ours.drain", topic=topic, count=count)
    check_each_ran_once(result["numbers"], range(count))
    _add(report, side, count, result)


def drain_raw(report: Report, function: str, count: int) -> None:
    """Fill the copy and let the raw statements empty it."""
    from tests.benchmarks.sides import ours, raw

    database.empty()
    ours.fill("Noop", count)
    raw.fill(count)
    _add(report, RAW, count, act(f"sides.raw.{function}", count=count))


def _add(report: Report, side: str, count: int, result: dict[str, float]) -> None:
    report.add(RATE, side, count / result["seconds"])
    report.add(CPU, side, result["cpu"] / count * 1e6)


def drain_peer(peer: Peer, bench: Bench) -> float:
    """Fill a peer's queue, let its worker empty it, and return the jobs a second.

    From the start of its first job to that of its last.
    """
    count = bench.scaled(peer.jobs)
    peer.fill(count)
    with peer.working() as file:
        wait_for_jobs(file, count, within=PEER_PATIENCE)
        ran = written_down(file)
    check_each_ran_once([number for number, _ in ran], range(count))
    moments = [moment for _, moment in ran]
    return (count - 1) / (max(moments) - min(moments))
