"""One run of one scenario: its database, its workers, its oracle, and what was done to them."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import psutil
from django.db import DatabaseError, InterfaceError, connection

from tests.chaos import controls
from tests.chaos.jobs import LEASE, Long, Work
from tests.chaos.oracle import Make, Oracle
from tests.chaos.server import Server
from tests.ledger import Ledger, Line

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
Kind = Literal["kill", "stop", "outage", "grace over"]

POSTGRES, SQLITE = "postgres", "sqlite"


class NotPossibleError(Exception):
    """This machine does not let a fault be injected; the message says why."""


class Loss(msgspec.Struct):
    """Something that may make a job run twice: when, to which process, None for all."""

    kind: Kind
    pid: int | None
    since: float  # moments of the monotonic clock
    until: float
    # How soon the jobs that it interrupted must begin again, None for any time.
    within: float | None = None


class Tree:
    """A `runjobs` process and its children, in a process group of their own."""

    def __init__(
        self,
        options: tuple[str, ...],
        log: Path,
        environment: dict[str, str],
        inside: Sequence[str] = (),
    ) -> None:
        self.options = options
        self.log_file = log
        self._environment = environment
        self.inside = inside
        self._log = log.open("ab")
        self.start()

    def start(self) -> None:
        """Start it, or start it again after its end."""
        self._process = subprocess.Popen(
            [*self.inside, sys.executable, "-m", "django", "runjobs", *self.options],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def processes(self) -> int:
        """How many worker processes it has."""
        return int(self.options[1]) if "--processes" in self.options else 1

    def children(self) -> list[int]:
        """Return the pids of its worker processes."""
        # psutil would read the state of every process of the machine.
        with suppress(OSError):
            return [
                int(pid)
                for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            ]
        return []

    def descendants(self) -> list[int]:
        """Return the pids of all processes under it."""
        with suppress(psutil.NoSuchProcess):
            return [one.pid for one in psutil.Process(self.pid).children(recursive=True)]
        return []

    def workers(self) -> list[int]:
        """Return the pids of the processes that run jobs."""
        return self.children() if "--processes" in self.options else [self.pid]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the whole process group, as if the host were gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, within: float) -> int | None:
        """Return its exit code, None when it does not end in time."""
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def names(self) -> list[str]:
        """Return what its worker processes are called since its last start."""
        return re.findall(r"worker=(\S+) started using=", self.log())[-self.processes :]


class Level(msgspec.Struct, frozen=True):
    """What the processes of a tree use: the most of any one of them."""

    descriptors: int
    rss_mib: float


class Rig:
    """What a scenario works with."""

    def __init__(self, fault: str, database: str, seed: int, seconds: float, folder: Path) -> None:
        self.fault = fault
        self.database = database
        self.seed = seed
        self.seconds = seconds
        self.folder = folder
        self.random = random.Random(f"{seed} {fault} {database}")
        self.oracle = Oracle()
        self.ledger = Ledger(folder / "ledger")
        self.trees: list[Tree] = []
        self.retired: list[Tree] = []
        self.losses: list[Loss] = []
        self.levels: dict[Tree, Level] = {}
        self.violations: list[str] = []
        self.recoveries: list[float] = []
        self.notes: list[str] = []
        # What is undone at the end, when the workers are gone: networks, mounts, groups.
        self.surroundings = ExitStack()
        # Bites that the scenario has counted itself; None: interrupted runs are counted.
        self.bites: int | None = None
        # Lines of PostgreSQL's log, as regular expressions, that the fault explains.
        self.expected_log: list[str] = []
        # Jobs that somebody has deleted on purpose.
        self.discarded: set[int] = set()
        # Failed jobs that somebody has told to run again.
        self.run_again: set[int] = set()
        # Topics whose jobs nobody runs, and so may wait at the end.
        self.unhandled: set[str] = set()
        # What is to be done once everything was looked at.
        self.at_end: list[Callable[[], None]] = []
        # Whether interrupted jobs are quick enough to be back in time though each waits its turn.
        self.recovers_at_once = False
        # How long the queue may take to drain, once the faults are over.
        self.drain_seconds = 60.0
        self._server: Server | None = None
        self._deadline = 0.0

    @property
    def server(self) -> Server:
        assert self._server is not None, f"{self.fault} needs PostgreSQL"
        return self._server

    @server.setter
    def server(self, server: Server) -> None:
        self._server = server

    # -- workers -------------------------------------------------------------

    def start_workers(
        self,
        *options: str,
        processes: int = 0,
        wait: bool = True,
        inside: Sequence[str] = (),
        log: Path | None = None,
        **environment: str,
    ) -> Tree:
        """Start `runjobs`, with so many processes under a supervisor or alone.

        `inside` is a command that starts another one somewhere or as somebody else, as
        `ip netns exec` does.
        """
        if processes:
            options = ("--processes", str(processes), *options)
        usual = self.folder / f"runjobs-{len(self.trees) + len(self.retired) + 1}.log"
        tree = Tree(options, log or usual, worker_environment(**environment), inside)
        self.trees.append(tree)
        if wait:
            self.wait_for_start(tree, tree.processes)
        return tree

    def wait_for_start(self, tree: Tree, times: int = 1) -> None:
        """Wait until so many worker processes of a tree have said that they started."""
        deadline = time.monotonic() + 30
        while tree.log().count(" started using=") < times:
            if time.monotonic() > deadline or not tree.is_alive:
                raise RuntimeError(f"runjobs did not start:\n{tree.log()[-2000:]}")
            time.sleep(0.05)

    @contextmanager
    def started_again(self, tree: Tree) -> Iterator[None]:
        """Start a tree again whenever it ends, as a service manager would."""
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.wait(0.2):
                if not tree.is_alive:
                    tree.start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        is_over.set()
        thread.join()

    def retire(self, tree: Tree, within: float = 32.0) -> None:
        """Ask a tree to drain; it must end with status 0, in the grace and two seconds."""
        tree.send(signal.SIGTERM)
        code = tree.wait(within)
        self.expect(code == 0, f"exit status {code} of a drain in {within:g} s")
        self.retired.append(tree)
        self.trees.remove(tree)
        if code is None:
            tree.kill()

    def end(self) -> None:
        """Kill what still runs, and undo what was done to the machine."""
        for tree in self.trees:
            tree.kill()
        for act in self.at_end:
            act()
        self.surroundings.close()

    def put_steadily(self, rate: float | None = None, make: Make | None = None) -> None:
        """Let the oracle put jobs, short ones unless `make` says otherwise, and warm up."""
        if rate is None:
            rate = 100.0 if self.database == POSTGRES else 40.0
        seed = f"{self.seed} {self.fault} {self.database}"
        self.oracle.start(make or short_work, rate=rate, seed=seed)

    def warm_up(self, seconds: float = 2.0) -> None:
        """Work undisturbed for a while, take note of what the workers use, start the clock."""
        time.sleep(seconds)
        self.levels = {tree: level_of(tree) for tree in self.trees}
        self.start_clock()

    def start_clock(self) -> None:
        """Let the time of the run begin now."""
        self._deadline = time.monotonic() + self.seconds

    # -- time ----------------------------------------------------------------

    def moments(self, shortest: float, longest: float) -> Iterator[float]:
        """Sleep random times, until the time of the run is over; yield the moments between."""
        while True:
            left = self._deadline - time.monotonic()
            pause = self.random.uniform(shortest, longest)
            if left <= pause:
                time.sleep(max(left, 0.0))
                return
            time.sleep(pause)
            yield time.monotonic()

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def wait_until(
        self, condition: Callable[[], T], *, because: str, within: float = 10.0
    ) -> T | None:
        """Wait until a condition is true; otherwise take note of a violation, return None."""
        deadline = time.monotonic() + within
        while True:
            if result := condition():
                return result
            if time.monotonic() > deadline:
                self.violate(f"not within {within:g} s: {because}")
                return None
            time.sleep(0.01)

    def wait_until_drained(self) -> None:
        """Wait until nothing is left but what has ended and stays, and what nobody here runs."""
        self.oracle.stop()
        began = time.monotonic()
        self.wait_until(self._is_drained, because="the queue drains", within=self.drain_seconds)
        others = [note for note in self.notes if not note.startswith("drained in ")]
        self.notes = [*others, f"drained in {time.monotonic() - began:.1f} s"]

    def _is_drained(self) -> bool:
        from myxo_jobs.models import Job

        try:
            rows = Job.objects.exclude(status__in=["done", "failed"])
            rows = rows.exclude(topic__in=self.unhandled)
            return not rows.exists()
        except (DatabaseError, InterfaceError):
            connection.close()
            return False

    # -- faults --------------------------------------------------------------

    @contextmanager
    def writers_held(self) -> Iterator[None]:
        """Around a time in which statements that write to the table wait where they are."""
        if self.database == POSTGRES:
            import psycopg

            with psycopg.connect(self.server.url) as other:
                other.execute("LOCK TABLE myxo_jobs IN EXCLUSIVE MODE")
                yield
            return
        name = str(connection.settings_dict["NAME"])
        with closing(sqlite3.connect(name, isolation_level=None, timeout=20)) as file:
            file.execute("BEGIN IMMEDIATE")
            yield

    def kill(self, pid: int, *, within: float | None) -> None:
        """Kill a process; jobs that it interrupts must begin again so soon."""
        since = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.losses.append(Loss("kill", pid, since, time.monotonic(), within))

    def kill_tree(self, tree: Tree, *, within: float | None) -> None:
        """Kill a whole process group, as if its host were gone."""
        pids = {tree.pid, *tree.workers()}
        since = time.monotonic()
        tree.kill()
        now = time.monotonic()
        self.losses += [Loss("kill", pid, since, now, within) for pid in pids]

    def restart(self, tree: Tree) -> None:
        """Start a tree that has ended again."""
        starts = tree.log().count(" started using=")
        tree.start()
        self.wait_for_start(tree, starts + tree.processes)

    def pause(self, pid: int, seconds: float) -> None:
        """Stop a process for so long."""
        since = time.monotonic()
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        self.losses.append(Loss("stop", pid, since, time.monotonic()))

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Around a time in which the database cannot be reached, or forgets what was new."""
        loss = Loss("outage", None, time.monotonic(), float("inf"))
        self.losses.append(loss)
        yield
        loss.until = time.monotonic()

    def bite(self) -> None:
        """Count a bite that is no interrupted run."""
        self.bites = (self.bites or 0) + 1

    def violate(self, what: str) -> None:
        self.violations.append(what)

    def expect(self, holds: bool, what: str) -> None:
        """Take note of a violation unless something holds."""
        if not holds:
            self.violate(what)

    # -- looking -------------------------------------------------------------

    def begun(self) -> list[Line]:
        return self.ledger.lines("begin")

    def measure_recovery(self, since: float, within: float, what: str) -> None:
        """Wait for the first job that begins after a moment; note how long it took."""
        found = self.wait_until(
            lambda: [line.at for line in self._last_begun() if line.at > since],
            because=f"a job begins after {what}",
            within=max(within * 3, 10.0),
        )
        if found:
            recovery = min(found) - since
            self.recoveries.append(recovery)
            self.expect(recovery <= within, f"{recovery:.1f} s until work went on after {what}")

    def _last_begun(self) -> list[Line]:
        """Return the newest lines of the ledger that tell of a begin."""
        path = self.folder / "ledger"
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 20_000, 0))
            lines = file.read().split(b"\n")[1:-1]
        decoded = [msgspec.json.decode(line, type=Line) for line in lines]
        return [line for line in decoded if line.event == "begin"]


def as_user(number: int) -> list[str]:
    """Return what runs a command as a user who need not exist, and who may read all files."""
    may_read = "-all,+dac_override,+dac_read_search"
    capabilities = [f"--inh-caps={may_read}", f"--ambient-caps={may_read}"]
    return ["setpriv", "--reuid", str(number), "--clear-groups", *capabilities]


def worker_environment(**more: str) -> dict[str, str]:
    """Return the environment of a worker process."""
    return {
        **os.environ,
        "MYXO_CHAOS_NAME": "chaos-worker",
        **controls.environment(controls.of_this_run()),
        **more,
    }


# Settings with which a project logs nowhere, and the worker to its standard error.
NO_LOGGING = {"MYXO_TEST_SETTINGS": '{"LOGGING": {}}'}


def short_work(number: int, chance: random.Random) -> msgspec.Struct:
    """Return a job of milliseconds; now and then one that asks the database, or raises."""
    return Work(
        number,
        seconds=chance.choice([0.0, 0.001, 0.005, 0.02, 0.05]),
        asks=chance.random() < 0.2,
        raises=1 if chance.random() < 0.05 else 0,
    )


def busy_work(number: int, chance: random.Random) -> msgspec.Struct:
    """Return a job that is easily met while it runs."""
    return Work(number, seconds=chance.uniform(0.02, 0.2))


def mixed_work(number: int, chance: random.Random) -> msgspec.Struct:
    """Return a short job, and one in fifty that takes longer than a lease."""
    if number % 50 == 0:
        return Long(number, seconds=LEASE * chance.uniform(1.2, 2.0))
    return short_work(number, chance)


def level_of(tree: Tree) -> Level:
    """Return what a tree uses now."""
    descriptors, rss = [0], [0.0]
    for pid in {tree.pid, *tree.workers()}:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            descriptors.append(process.num_fds())
            rss.append(process.memory_info().rss / 2**20)
    return Level(max(descriptors), max(rss))


def connections_of_workers() -> int:
    """Return how many sessions worker processes have on the server."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'chaos-worker'"
        )
        row: Any = cursor.fetchone()
    return int(row[0])
