"""How soon a put job starts, in milliseconds from before the put."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.benchmarks import database
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.evidence import check_each_ran_once, wait_for_jobs, written_down
from tests.benchmarks.peers import Peer, contestants, left_out_if_void
from tests.benchmarks.processes import Actor, Stage, ended, python_actor
from tests.benchmarks.reports import OURS, PEERS, Report, at_most, percentile
from tests.benchmarks.scenarios.drains import PEER_PATIENCE

PUTS = 100
PEER_PUTS = 40
#: Long enough for a worker to become idle again.
PAUSE_SECONDS = (0.15, 0.25)
P50, P99 = "p50 ms", "p99 ms"


@scenario(
    "milliseconds from a put to the start of its handler, the worker being idle",
    postgres=[at_most(P50, 3), at_most(P99, 15), at_most(P50, 1, PEERS), at_most(P99, 1, PEERS)],
    sqlite=[at_most(P50, 12), at_most(P99, 30), at_most(P50, 1, PEERS), at_most(P99, 1, PEERS)],
)
def latency(bench: Bench, report: Report) -> None:
    for _ in range(bench.rounds):
        database.empty()
        pauses = _pauses(bench.scaled(PUTS))
        worker = python_actor("sides.ours.work", {}, topics=["benchmark.timed"])
        putter = python_actor("sides.ours.put_at_a_pace", {}, first=0, pauses=pauses)
        add_percentiles(report, OURS, waits(worker, [putter]))
        for peer in contestants(bench):
            with left_out_if_void(report, peer):
                peer.empty()
                pauses = _pauses(bench.scaled(PEER_PUTS))
                add_percentiles(report, peer.name, _waits_of(peer, pauses))


def _pauses(count: int) -> list[float]:
    return [random.uniform(*PAUSE_SECONDS) for _ in range(count)]


def _waits_of(peer: Peer, pauses: list[float]) -> list[float]:
    putter = peer.actor("put_at_a_pace", first=0, pauses=pauses)
    with peer.working() as file, Stage() as stage:
        # It puts one job to begin with: by it the worker is seen to have started.
        stage.enter(putter)
        putter.wait_until_ready()
        wait_for_jobs(file, 1, within=PEER_PATIENCE)
        putter.say()
        puts = dict(putter.result())
        wait_for_jobs(file, len(puts) + 1, within=PEER_PATIENCE)
        starts = [(number, moment) for number, moment in written_down(file) if number >= 0]
    check_each_ran_once([number for number, _ in starts], list(puts))
    return [(moment - puts[number]) * 1e3 for number, moment in starts]


def waits(worker: Actor, putters: Sequence[Actor], spare: float = 3.0) -> list[float]:
    """Let putters put while a worker works; return the wait of each job, in milliseconds.

    The worker gets `spare` seconds for the last of them.
    """
    with Stage() as stage:
        stage.begin(worker, *putters)
        puts = {number: moment for putter in putters for number, moment in putter.result()}
        stage.pause(spare)
        starts = ended(worker)["moments"]
    check_each_ran_once([number for number, _ in starts], list(puts))
    return [(moment - puts[number]) * 1e3 for number, moment in starts]


def add_percentiles(report: Report, side: str, waits: Sequence[float]) -> None:
    """Add the percentiles of a round's waits."""
    report.add(P50, side, percentile(waits, 0.5))
    report.add(P99, side, percentile(waits, 0.99))
