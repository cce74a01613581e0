"""One run against one queue: what `python -m tests.chaos.peers` starts for each."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from tests.chaos.peers.peer import Peer
from tests.ledger import Ledger, Line

ROOT = Path(__file__).parents[3]
KILL_EVERY_SECONDS = 0.5
WARM_UP_SECONDS = 5.0
# systemd's RestartSec, unless a unit says otherwise.
RESTART_SECONDS = 0.1
# The end of a job that had ended so long before the kill was stored.
SETTLED_SECONDS = 2.0
# Once all have ended: so long, to see whether one runs again.
LOOK_ON_SECONDS = 10.0


class Order(msgspec.Struct, frozen=True):
    """What to run, and where."""

    module: str
    name: str  # of the Peer in it
    seed: int
    seconds: float
    rate: float
    wait: float  # for what has not ended when the kills do
    folder: str


class Outcome(msgspec.Struct, frozen=True):
    """What became of a run."""

    what: str
    puts: int
    kills: int
    interrupted: int
    never_started: int
    not_run_again: int
    twice: int  # beyond what a kill explains
    median_recovery: float | None
    slowest_recovery: float | None


class Kill(msgspec.Struct, frozen=True):
    pid: int
    at: float  # of the monotonic clock, as all moments


class Run(msgspec.Struct):
    """One run of a job, as the ledger has it."""

    pid: int
    begun: float
    ended: float = float("inf")


class Service:
    """A process that is started again whenever it ends, as systemd does with Restart=always."""

    def __init__(self, peer: Peer, log: Path) -> None:
        self._peer = peer
        self._log = log.open("ab")
        self._stopped = False
        self._start()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def workers(self) -> list[int]:
        """Return the pids of its worker processes."""
        return self._peer.workers(self._process.pid) if self._process.poll() is None else []

    def stop(self) -> None:
        self._stopped = True
        self._kill()
        self._thread.join()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "django", *self._peer.command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _serve(self) -> None:
        while True:
            self._process.wait()
            if self._stopped:
                return
            self._kill()  # what is left of its group
            time.sleep(RESTART_SECONDS)
            self._start()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run(order: Order) -> Outcome:
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    peer: Peer = getattr(import_module(order.module), order.name)
    ledger = Ledger(Path(order.folder, "ledger"))
    logs = [Path(order.folder, f"{number}.log") for number in range(peer.times)]
    services = [Service(peer, log) for log in logs]
    try:
        with putting(peer, order.rate) as puts:
            time.sleep(WARM_UP_SECONDS)
            kills = list(_kill(services, order))
        _wait(ledger, puts, order.wait)
    finally:
        for service in services:
            service.stop()
    return _outcome(peer, puts, kills, ledger.lines())


@contextmanager
def putting(peer: Peer, rate: float) -> Iterator[list[int]]:
    """Put so many jobs a second meanwhile; the list is of the acknowledged ones."""
    puts: list[int] = []
    is_over = threading.Event()

    def serve() -> None:
        following = time.monotonic()
        for number in itertools.count(1):
            if is_over.is_set():
                return
            peer.put(number)
            puts.append(number)
            following += 1 / rate
            is_over.wait(max(following - time.monotonic(), 0.0))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield puts
    is_over.set()
    thread.join()


def _kill(services: list[Service], order: Order) -> Iterator[Kill]:
    chance = random.Random(order.seed)
    following = time.monotonic()
    end = following + order.seconds
    while following < end:
        following = max(following + KILL_EVERY_SECONDS, time.monotonic())
        time.sleep(max(following - time.monotonic(), 0.0))
        draw = chance.random()
        workers = [pid for service in services for pid in service.workers()]
        if workers:
            pid = workers[int(draw * len(workers))]
            with suppress(ProcessLookupError):
                at = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                yield Kill(pid, at)


def _wait(ledger: Ledger, puts: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = {line.name for line in ledger.lines("end")}
        if len(ended) == len(puts):
            time.sleep(LOOK_ON_SECONDS)
            return
        time.sleep(1)


def _outcome(peer: Peer, puts: list[int], kills: list[Kill], lines: list[Line]) -> Outcome:
    runs = _runs(lines)
    killed: dict[int, float] = {kill.pid: kill.at for kill in kills}
    interrupted, recoveries, twice = 0, [], 0
    for of_job in runs.values():
        interrupted += sum(one.pid in killed and one.ended == float("inf") for one in of_job)
        for one, following in pairwise(of_job):
            at = killed.get(one.pid, float("inf"))
            if at > min(following.begun, one.ended + SETTLED_SECONDS):
                twice += 1
            elif at < one.ended:
                recoveries.append(following.begun - at)
    unended = [
        number for number in puts if all(one.ended == float("inf") for one in runs[str(number)])
    ]
    return Outcome(
        what=peer.what,
        puts=len(puts),
        kills=len(kills),
        interrupted=interrupted,
        never_started=sum(not runs[str(number)] for number in unended),
        not_run_again=sum(bool(runs[str(number)]) for number in unended),
        twice=twice,
        median_recovery=median(recoveries) if recoveries else None,
        slowest_recovery=max(recoveries, default=None),
    )


def _runs(lines: list[Line]) -> defaultdict[str, list[Run]]:
    """Return the runs of each job, in the order of their begins."""
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    unfinished: dict[tuple[str, int], Run] = {}
    for line in sorted(lines, key=lambda line: line.at):
        place = (line.name, line.pid)
        if line.event == "begin":
            unfinished[place] = Run(line.pid, line.at)
            runs[line.name].append(unfinished[place])
        elif line.event == "end":
            unfinished.pop(place).ended = line.at
    return runs


if __name__ == "__main__":
    order = msgspec.json.decode(sys.argv[1], type=Order)
    Path(order.folder, "outcome.json").write_bytes(msgspec.json.encode(run(order)))
