"""Faults of worker processes: killed, stopped, told to leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import psutil
from django.db import connection

from tests.chaos.database import LEAVING
from tests.chaos.jobs import LEASE, Once, Stale
from tests.chaos.rig import (
    POSTGRES,
    ROOT,
    Loss,
    Rig,
    Tree,
    busy_work,
    mixed_work,
    short_work,
)
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
        rig.restart(tree)


@scenario("F2", "kill -9 of a supervisor, with a second worker running")
def supervisors_are_killed(rig: Rig) -> None:
    tree = rig.start_workers("--grace", "5", processes=2)
    rig.start_workers()
    rig.put_steadily(rate=50.0, make=busy_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(0.5, 2.0):
        children = tree.workers()
        tree.send(signal.SIGKILL)
        killed_at = time.monotonic()
        tree.wait(5)
        rig.wait_until(
            partial(_are_gone, children),
            because="the children of a killed supervisor drain",
            within=5 + 2 + 2,
        )
        late = [line for line in rig.begun() if line.pid in children and line.at > killed_at + 2]
        rig.expect(not late, f"children went on without their supervisor: {late[:3]}")
        if any(line.pid in children and line.at > killed_at for line in rig.ledger.lines("end")):
            rig.bite()
        rig.restart(tree)


def _are_gone(pids: list[int]) -> bool:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


@scenario("F3", "a whole host gone: its process group killed, with another one running")
def hosts_are_gone(rig: Rig) -> None:
    tree = rig.start_workers(processes=2)
    rig.start_workers()
    rig.put_steadily(rate=50.0, make=busy_work)
    rig.warm_up()
    for _ in rig.moments(1.0, 3.0):
        rig.kill_tree(tree, within=LEASE + 2)
        rig.restart(tree)


@scenario("F4", "SIGSTOP of a worker for longer than its lease, then SIGCONT")
def workers_are_stopped(rig: Rig) -> None:
    trees = [rig.start_workers(), rig.start_workers(processes=2)]
    rig.put_steadily(rate=30.0, make=_stale_work)
    rig.warm_up()
    for _ in rig.moments(0.1, 0.5):
        for _ in range(5):
            rig.oracle.put(Once(rig.oracle.number(), 0.5), key=f"key {rig.random.randrange(8)}")
        pid = rig.random.choice(rig.random.choice(trees).workers())
        rig.pause(pid, LEASE * rig.random.uniform(1.2, 2.2))


def _stale_work(number: int, chance: Random) -> msgspec.Struct:
    if number % 3:
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
        workers = set(tree.workers())
        told_at = time.monotonic()
        tree.send(signal.SIGTERM)
        code = tree.wait(GRACE + 2)
        rig.expect(code == 0, f"exit status {code} of a deploy")
        if any(line.pid in workers and line.at > told_at for line in rig.ledger.lines("end")):
            rig.bite()
        rig.restart(tree)


def _check_deploys(rig: Rig) -> None:
    rig.wait_until_drained()
    raised = {line.job for line in rig.ledger.lines("raise")}
    used = [line for line in rig.begun() if line.attempt > 1 and line.job not in raised]
    rig.expect(not used, f"{len(used)} attempts used by deploys, such as {used[:3]}")


@scenario("F31", "SIGTERM, SIGINT, two of them, SIGHUP, at random moments")
def workers_are_told_to_leave(rig: Rig) -> None:
    tree = rig.start_workers("--grace", "1")
    supervised = rig.start_workers("--grace", "1", processes=2)
    rig.start_workers()
    rig.put_steadily(rate=30.0, make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(0.2, 1.5):
        one = rig.random.choice([tree, supervised])
        how = rig.random.choice([_drain, _drain_by_a_key, _leave, _hang_up])
        pids = {one.pid, *one.workers()}
        since = time.monotonic()
        how(rig, one)
        # What still runs at the end of the grace is given back, and may run beside it.
        rig.losses += [Loss("kill", pid, since, time.monotonic()) for pid in pids]
        rig.bite()
        one.kill()
        rig.restart(one)


def _drain(rig: Rig, tree: Tree) -> None:
    tree.send(signal.SIGTERM)
    code = tree.wait(1 + 2 + 1)
    rig.expect(code == 0, f"exit status {code} after SIGTERM")


def _drain_by_a_key(rig: Rig, tree: Tree) -> None:
    tree.send(signal.SIGINT)
    code = tree.wait(1 + 2 + 1)
    rig.expect(code == 0, f"exit status {code} after SIGINT")


def _leave(rig: Rig, tree: Tree) -> None:
    tree.send(signal.SIGTERM)
    time.sleep(rig.random.uniform(0.0, 0.3))
    tree.send(signal.SIGTERM)
    code = tree.wait(3)
    # The first may have been enough, or the second have met an interpreter that was leaving.
    ways = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    rig.expect(code in ways, f"exit status {code} after two SIGTERM")


def _hang_up(rig: Rig, tree: Tree) -> None:
    tree.send(signal.SIGHUP)
    code = tree.wait(1 + 2 + 1)
    rig.expect(code is not None, "did not end after SIGHUP")


@scenario("F48", "no file descriptors left in a worker process")
def descriptors_run_out(rig: Rig) -> None:
    tree = rig.start_workers()
    rig.put_steadily(rate=30.0, make=mixed_work)
    rig.warm_up()
    process = psutil.Process(tree.pid)
    usual = process.rlimit(psutil.RLIMIT_NOFILE)
    rig.bites = 0
    for _ in rig.moments(1.0, 2.0):
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), usual[1]))
        before = sum(process.cpu_times()[:2])
        began = time.monotonic()
        _cut_sessions(rig)
        time.sleep(LEASE * rig.random.uniform(0.2, 0.8))
        used = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
        process.rlimit(psutil.RLIMIT_NOFILE, usual)
        rig.expect(used < 0.8, f"{used:.0%} of a core used while no descriptor was left")
        rig.bite()
        rig.measure_recovery(time.monotonic(), 5.0, "descriptors were there again")


def _cut_sessions(rig: Rig) -> None:
    """Make the workers connect anew, where they can be made to."""
    if rig.database == POSTGRES:
        rig.expected_log = LEAVING
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'chaos-worker'"
            )


@scenario("F49", "a log that nobody reads: its reader is gone, or its disk is full")
def logs_are_lost(rig: Rig) -> None:
    with tempfile.TemporaryDirectory(prefix="myxo-chaos-log-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
        try:
            _lose_logs(rig, Path(folder, "log"))
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def _lose_logs(rig: Rig, full: Path) -> None:
    command = [sys.executable, "-m", "django", "runjobs"]
    environment = {**os.environ, "MYXO_CHAOS_NAME": "chaos-worker"}
    with full.open("wb") as log:
        on_a_full_disk = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=log
        )
    unread = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert unread.stdout is not None
    unread.stdout.close()
    rig.put_steadily()
    rig.warm_up(5.0)
    rig.bites = 0
    for _ in rig.moments(0.5, 1.0):
        for process in (on_a_full_disk, unread):
            rig.expect(process.poll() is None, "a worker ended since its log could not be written")
    rig.wait_until_drained()
    begins = rig.begun()
    for process in (on_a_full_disk, unread):
        ran = sum(line.pid == process.pid for line in begins)
        rig.expect(ran > 0, "a worker ran nothing since its log could not be written")
        rig.bites += ran
        process.terminate()
        rig.expect(process.wait(35) == 0, "a worker without a log did not drain")
