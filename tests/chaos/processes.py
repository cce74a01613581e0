"""Faults of worker processes: killed, stopped, told to leave."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import msgspec

from tests.chaos.jobs import LEASE, Once, Stale
from tests.chaos.rig import Rig, Tree, busy_work, mixed_work, short_work
from tests.chaos.scenario import scenario

GRACE = 10.0


@scenario("F1", "kill -9 of a random worker process, under a supervisor and without one")
def workers_are_killed(rig: Rig) -> None:
    supervised = rig.start_workers(processes=2)
    rig.put_steadily(rate=50.0, make=busy_work)
    rig.warm_up()
    half = time.monotonic() + rig.seconds / 2
    for now in rig.moments(0.2, 2.0):
        if now > half:
            break
        if children := supervised.workers():
            rig.kill(rig.random.choice(children), within=1.0)
    alone = [rig.start_workers(), rig.start_workers()]
    rig.retire(supervised)
    for _ in rig.moments(0.2, 2.0):
        tree = rig.random.choice(alone)
        rig.kill(tree.pid, within=LEASE + 2)
        tree.wait(5)
        starts = tree.log().count(" started using=")
        tree.start()
        rig.wait_for_start(tree, starts + 1)


@scenario("F4", "SIGSTOP of a worker for longer than its lease, then SIGCONT")
def workers_are_stopped(rig: Rig) -> None:
    trees = [rig.start_workers(), rig.start_workers()]
    rig.put_steadily(rate=30.0, make=_stale_work)
    rig.warm_up()
    for _ in rig.moments(0.1, 0.5):
        for _ in range(5):
            rig.oracle.put(Once(rig.oracle.number(), 0.5), key=f"key {rig.random.randrange(8)}")
        rig.pause(rig.random.choice(trees).pid, LEASE * rig.random.uniform(1.2, 2.2))


def _stale_work(number: int, chance: Random) -> msgspec.Struct:
    if number % 5:
        return short_work(number, chance)
    return Stale(
        number,
        first=chance.choice(["returns", "raises"]),
        then=chance.choice(["returns", "raises"]),
        seconds=chance.choice([0.0, 1.0, 3.0]),
    )


@scenario("F30", "SIGTERM and a new start of every worker, again and again, under load")
def workers_are_deployed(rig: Rig) -> None:
    trees = [
        rig.start_workers("--grace", f"{GRACE:g}"),
        rig.start_workers("--grace", f"{GRACE:g}", processes=2),
    ]
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(lambda tree: _deploy(rig, tree), trees))
    _check_deploys(rig)


def _deploy(rig: Rig, tree: Tree) -> None:
    chance = Random(f"{rig.seed} {tree.options}")
    while not rig.is_over():
        time.sleep(chance.uniform(0.5, 3.0))
        starts = tree.log().count(" started using=")
        workers = set(tree.workers())
        told_at = time.monotonic()
        tree.send(signal.SIGTERM)
        code = tree.wait(GRACE + 2)
        rig.expect(code == 0, f"exit status {code} of a deploy")
        if any(line.pid in workers and line.at > told_at for line in rig.ledger.lines("end")):
            rig.bite()
        tree.start()
        rig.wait_for_start(tree, starts + len(workers))


def _check_deploys(rig: Rig) -> None:
    raised = {line.job for line in rig.ledger.lines("raise")}
    used = [line for line in rig.begun() if line.attempt > 1 and line.job not in raised]
    rig.expect(not used, f"{len(used)} attempts used by deploys, such as {used[:3]}")
