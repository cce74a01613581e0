"""Faults of worker processes: killed, stopped, told to leave."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
from django.db import connection

from tests.chaos.database import LEAVING
from tests.chaos.jobs import LEASE, Async, Newest, Once, Rare, Stale
from tests.chaos.rig import (
    NO_LOGGING,
    POSTGRES,
    ROOT,
    Loss,
    Rig,
    Tree,
    busy_work,
    mixed_work,
    short_work,
    worker_environment,
)
from tests.chaos.scenario import scenario

GRACE = 10.0
GRACE_OF_LEAVING = 1.0


@scenario("F1", "kill -9 of a random worker process, under a supervisor and without one")
def workers_are_killed(rig: Rig) -> None:
    supervised = rig.start_workers(processes=2)
    rig.put_steadily(rate=50.0, make=busy_work)
    rig.warm_up()
    half = time.monotonic() + rig.seconds / 2
    for place, now in enumerate(rig.moments(0.2, 2.0)):
        if now > half:
            break
        if children := supervised.workers():
            with _at_its_statement(rig, place):
                rig.kill(rig.random.choice(children), within=1.0)
    alone = [rig.start_workers(), rig.start_workers()]
    rig.retire(supervised)
    alone_since = time.monotonic()
    for place, _ in enumerate(rig.moments(0.2, 2.0)):
        tree = rig.random.choice(alone)
        with _at_its_statement(rig, place):
            rig.kill(tree.pid, within=LEASE + 2)
        tree.wait(5)
        rig.restart(tree)
    rig.wait_until_drained()
    _check_charges(rig, alone_since)


@contextmanager
def _at_its_statement(rig: Rig, place: int) -> Iterator[None]:
    """Every third time, around a moment in which workers wait in a claim or a completion."""
    if place % 3:
        yield
        return
    with rig.writers_held():
        time.sleep(rig.random.uniform(0.05, 0.3))
        yield


def _check_charges(rig: Rig, alone_since: float) -> None:
    """Check that kills have charged no attempt but those of jobs that had started.

    Alone, a claimed job may be charged once, for nobody knows that it had not started.
    """
    charged: dict[int, float] = {}
    begins: Counter[int] = Counter()
    for line in rig.begun():
        begins[line.job] += 1
        excess = line.attempt - begins[line.job]
        rig.expect(excess <= 1, f"job {line.job} was charged {excess} attempts unrun")
        if excess > 0:
            charged.setdefault(line.job, line.at)
    early = sorted(job for job, at in charged.items() if at < alone_since)
    # A run is started a moment before its handler can say so: a kill may fall there.
    rig.expect(len(early) <= 1, f"charged under a supervisor, though not run: {early}")


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


@scenario(
    "F31",
    "SIGTERM, SIGINT, two of them, SIGHUP, in statements that wait and stopped; a closed terminal",
)
def workers_are_told_to_leave(rig: Rig) -> None:
    tree = rig.start_workers("--grace", "1")
    supervised = rig.start_workers("--grace", "1", processes=2)
    rig.start_workers()
    rig.put_steadily(rate=30.0, make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(0.2, 1.5):
        one = rig.random.choice([tree, supervised])
        how = rig.random.choice([_drain, _drain, _drain, _leave])
        pids = {one.pid, *one.workers()}
        since = time.monotonic()
        how(rig, one)
        # What still runs at the end of the grace is given back, and may run beside it.
        rig.losses += [Loss("kill", pid, since, time.monotonic()) for pid in pids]
        rig.bite()
        one.kill()
        rig.restart(one)
    for options in ((), ("--processes", "1")):
        _lose_the_reader(rig, *options)
        _lose_the_terminal(rig, *options)


def _drain(rig: Rig, tree: Tree) -> None:
    number = rig.random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    names = tree.names()
    with _held_up(rig, tree) as where:
        tree.send(number)
        time.sleep(rig.random.uniform(0.1, 0.5))
    code = tree.wait(GRACE_OF_LEAVING + 2 + 1)
    rig.expect(code == 0, f"exit status {code} after {number.name}, {where}")
    _check_given_back(rig, names, f"{number.name}, {where}")


@contextmanager
def _held_up(rig: Rig, tree: Tree) -> Iterator[str]:
    """Around a moment in which workers wait in their statements, or are stopped, or neither."""
    where = rig.random.choice(["at work", "in statements", "stopped"])
    if where == "in statements":  # claims, renewals and completions
        with rig.writers_held():
            time.sleep(LEASE / 3)
            yield where
        return
    pids = tree.workers() if where == "stopped" else []
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield where
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _check_given_back(rig: Rig, names: list[str], when: str) -> None:
    from myxo_jobs.models import Job

    for name in names:
        held = list(Job.objects.filter(worker__startswith=name).values("id", "topic", "status"))
        rig.expect(not held, f"not given back after {when}: {held[:3]}")


def _leave(rig: Rig, tree: Tree) -> None:
    tree.send(signal.SIGTERM)
    time.sleep(rig.random.uniform(0.0, 0.3))
    tree.send(signal.SIGTERM)
    code = tree.wait(3)
    # The first may have been enough, or the second have met an interpreter that was leaving.
    ways = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    rig.expect(code in ways, f"exit status {code} after two SIGTERM")


def _lose_the_reader(rig: Rig, *options: str) -> None:
    """`runjobs | head`: the reader ends, the worker goes on, and drains when told to."""
    head = subprocess.Popen(["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert head.stdin is not None
    with _started(rig, *options, stdout=head.stdin, stderr=head.stdin) as process:
        head.stdin.close()
        head.wait(30)
        gone_at = time.monotonic()
        pids = _wait_until_it_works(rig, process, gone_at)
        process.terminate()
        code = _wait(process, GRACE_OF_LEAVING + 2 + 1)
        rig.expect(code == 0, f"exit status {code} of runjobs {' '.join(options)} | head")
        rig.losses += [Loss("kill", pid, gone_at, time.monotonic()) for pid in pids]
        rig.bite()


def _lose_the_terminal(rig: Rig, *options: str) -> None:
    """The terminal is closed: the worker drains by itself."""
    terminal, own = pty.openpty()
    take_it = partial(fcntl.ioctl, own, termios.TIOCSCTTY, 0)
    with _started(
        rig, *options, stdin=own, stdout=own, stderr=own, start_new_session=True, preexec_fn=take_it
    ) as process:
        os.close(own)
        shown = b""
        while shown.count(b" started using=") < 1:
            shown += os.read(terminal, 1000)
        names = re.findall(r"worker=(\S+) started using=", shown.decode())
        pids = _wait_until_it_works(rig, process, time.monotonic())
        closed_at = time.monotonic()
        os.close(terminal)
        code = _wait(process, GRACE_OF_LEAVING + 2 + 1)
        rig.expect(code == 0, f"exit status {code} of runjobs {' '.join(options)}, terminal closed")
        _check_given_back(rig, names, "the end of the terminal")
        rig.losses += [Loss("kill", pid, closed_at, time.monotonic()) for pid in pids]
        rig.bite()


@contextmanager
def _started(rig: Rig, *options: str, **named: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker that logs to its standard error alone; kill it in the end."""
    command = [sys.executable, "-m", "django", "runjobs", "--grace", f"{GRACE_OF_LEAVING:g}"]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, env=worker_environment(**NO_LOGGING), **named
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_until_it_works(rig: Rig, process: subprocess.Popen[bytes], since: float) -> set[int]:
    """Wait until a worker or its child begins a job; return the pids of both."""
    pids = {process.pid}

    def works() -> bool:
        with suppress(psutil.NoSuchProcess):
            pids.update(child.pid for child in psutil.Process(process.pid).children())
        return any(line.pid in pids and line.at > since for line in rig.begun())

    rig.wait_until(works, because="a worker whose log is lost runs jobs")
    return pids


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


@scenario("F48", "no file descriptors left in a worker process; no threads, no processes")
def limits_are_met(rig: Rig) -> None:
    tree = rig.start_workers()
    few = _of_users_of_their_own(rig)
    rig.put_steadily(rate=30.0, make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    rig.seconds /= 2
    for act in (partial(_take_threads, rig, *few), partial(_take_descriptors, rig, tree)):
        rig.start_clock()
        act()


def _of_users_of_their_own(rig: Rig) -> list[Tree]:
    """Start workers as users who are not root, whom no limit of threads meets."""
    first = 61_000 + os.getpid() % 1_000 * 2
    return [
        rig.start_workers(user=first),
        rig.start_workers("--topics", "chaos.Work,chaos.Long", processes=2, user=first + 1),
    ]


def _take_threads(rig: Rig, alone: Tree, supervised: Tree) -> None:
    """Let the system refuse more threads and processes, and kill one so that it has to."""
    others: list[Callable[[int], Any]] = [Once, Rare, Newest, Async]  # no thread runs these yet
    usual, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    for _ in rig.moments(1.0, 2.0):
        for tree in (alone, supervised):
            _limit_threads(tree, 1)
        rig.kill(supervised.workers()[0], within=None)
        limited = [psutil.Process(tree.pid) for tree in (alone, supervised)]
        before = [sum(process.cpu_times()[:2]) for process in limited]
        began = time.monotonic()
        if others:
            make = others.pop()
            for _ in range(20):
                rig.oracle.put(make(rig.oracle.number()))
        time.sleep(LEASE)
        rig.expect(alone.is_alive, "a worker ended since it could start no thread")
        took = time.monotonic() - began
        for process, used in zip(limited, before, strict=True):
            share = (sum(process.cpu_times()[:2]) - used) / took
            rig.expect(share < 0.8, f"{share:.0%} of a core used while nothing could be started")
        for tree in (alone, supervised):
            _limit_threads(tree, usual)
        rig.wait_until(
            lambda: len(supervised.workers()) == 2,
            because="the supervisor has its workers again",
            within=15,
        )
    for tree, what in ((alone, "thread"), (supervised, "worker process")):
        refused = tree.log().count(f"cannot start a {what}, tries on")
        rig.bites = (rig.bites or 0) + refused
        rig.expect(refused > 0, f"no {what} was refused")


def _limit_threads(tree: Tree, count: int) -> None:
    """Let a tree's user have so many threads, as far as its first process is asked."""
    command = ["prlimit", "--pid", str(tree.pid), f"--nproc={count}:"]
    subprocess.run([*tree.prefix, *command], check=True)


def _take_descriptors(rig: Rig, tree: Tree) -> None:
    process = psutil.Process(tree.pid)
    usual = process.rlimit(psutil.RLIMIT_NOFILE)
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


@scenario("F49", "a log that nobody reads: its reader is gone or asleep, or its disk is full")
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
    sleeper = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    assert sleeper.stdin is not None
    fcntl.fcntl(sleeper.stdin, fcntl.F_SETPIPE_SZ, 4096)
    blocked = subprocess.Popen(
        command, env=environment | NO_LOGGING, cwd=ROOT, stdout=sleeper.stdin, stderr=sleeper.stdin
    )
    processes = (on_a_full_disk, unread, blocked)
    rig.put_steadily()
    rig.warm_up(5.0)
    rig.bites = 0
    for _ in rig.moments(0.5, 1.0):
        for process in processes:
            rig.expect(process.poll() is None, "a worker ended since its log could not be written")
    rig.wait_until_drained()
    rig.expect(not select.select([], [sleeper.stdin], [], 0)[1], "the pipe is not full")
    begins = rig.begun()
    for process in processes:
        ran = sum(line.pid == process.pid for line in begins)
        rig.expect(ran > 0, "a worker ran nothing since its log could not be written")
        rig.bites += ran
        process.terminate()
        rig.expect(process.wait(35) == 0, "a worker without a log did not drain")
    sleeper.kill()
    sleeper.wait()
