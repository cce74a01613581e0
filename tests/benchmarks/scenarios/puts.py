"""What a put costs its caller."""

from __future__ import annotations

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.evidence import Void, wait_for_jobs
from tests.benchmarks.peers import Peer, contestants, left_out_if_void
from tests.benchmarks.processes import Stage, python_actor
from tests.benchmarks.reports import OURS, PEERS, RAW, Report, at_least, at_most
from tests.benchmarks.scenarios.drains import PEER_PATIENCE, act

BACKLOG = {"postgres": 250_000, "sqlite": 500_000}
SECONDS = 2.0
RATE = "puts/s"
ADDED = "µs added"
MANY, TIMES = 10_000, 5
ATOMIC_TIMES = 1_500


@scenario(
    "single puts a second, each its own transaction, while a worker empties a backlog",
    postgres=[at_least(RATE, 0.75, RAW), at_least(RATE, 1, PEERS)],
    sqlite=[at_least(RATE, 0.65, RAW), at_least(RATE, 1, PEERS)],
)
def put(bench: Bench, report: Report) -> None:
    for _ in range(bench.rounds):
        for side in (OURS, RAW):
            report.add(RATE, side, _beside_a_busy_worker(bench, side))
        for peer in contestants(bench):
            with left_out_if_void(report, peer):
                report.add(RATE, peer.name, _peer_beside_its_busy_worker(peer))


def _beside_a_busy_worker(bench: Bench, side: str) -> float:
    from myxo_jobs.models import Job
    from tests.benchmarks.sides import ours

    database.empty()
    ours.fill("Noop", BACKLOG[bench.database])
    worker = python_actor("sides.ours.work", {}, topics=["benchmark.noop"])
    putter = python_actor(f"sides.{side}.put", {}, seconds=SECONDS)
    with Stage() as stage:
        stage.begin(worker, putter)
        result = putter.result()
    if not Job.objects.filter(topic="benchmark.noop").exists():
        raise Void("the worker had emptied its backlog before the puts ended")
    return float(result["count"] / result["seconds"])


def _peer_beside_its_busy_worker(peer: Peer) -> float:
    peer.fill(2 * peer.jobs)
    with peer.working() as file, Stage() as stage:
        wait_for_jobs(file, 1, within=PEER_PATIENCE)
        result = stage.perform(peer.actor("put", seconds=SECONDS))[0]
    return float(result["count"] / result["seconds"])


@scenario(
    "microseconds that a put adds to the caller's transaction, up to its commit",
    postgres=[at_most(ADDED, 1.4, RAW)],
    sqlite=[at_most(ADDED, 1.4, RAW)],
)
def put_atomic(bench: Bench, report: Report) -> None:
    for _ in range(bench.rounds):
        database.empty()
        micros = act("sides.ours.put_atomic", times=bench.scaled(ATOMIC_TIMES))
        for side in (OURS, RAW):
            report.add(ADDED, side, micros[side] - micros["bare"])
        report.add("µs without it", "the transaction", micros["bare"])


@scenario(
    f"jobs a second put {MANY:,} at once",
    postgres=[at_least(RATE, 0.6, RAW), at_least(RATE, 1.5, PEERS)],
    sqlite=[at_least(RATE, 100_000), at_least(RATE, 0.4, RAW)],
)
def put_many(bench: Bench, report: Report) -> None:
    for _ in range(bench.rounds):
        for side in (OURS, RAW):
            database.empty()
            result = act(f"sides.{side}.put_many", count=MANY, times=TIMES)
            report.add(RATE, side, result["count"] / result["seconds"])
        for peer in contestants(bench):
            with left_out_if_void(report, peer), Stage() as stage:
                peer.empty()
                result = stage.perform(peer.actor("put_many", count=MANY, times=1))[0]
                report.add(RATE, peer.name, result["count"] / result["seconds"])
