"""Faults of the server: sessions cut, crashes, absence."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import psutil
import psycopg
from django.db import connection

from myxo_jobs import Jobs
from tests.chaos.jobs import LEASE, Dirt, Long, Work
from tests.chaos.rig import POSTGRES, Loss, Rig, Tree, mixed_work, short_work
from tests.chaos.scenario import scenario

GRACE = 2.0
BACKLOG = 2_000

# What a server that crashes, or is stopped, says to those who are or would be there.
LEAVING = [
    r"FATAL:  terminating connection due to administrator command",
    r"FATAL:  the database system is (starting up|shutting down|in recovery mode)",
    r"FATAL:  the database system is not yet accepting connections",
]


@scenario("F5", "pg_terminate_backend of a random session every 100 ms", (POSTGRES,))
def sessions_are_cut(rig: Rig) -> None:
    rig.expected_log = LEAVING
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    with psycopg.connect(rig.server.url, autocommit=True) as admin:
        for _ in rig.moments(0.05, 0.15):
            sessions = admin.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'chaos%' ORDER BY pid"
            ).fetchall()
            if sessions:
                pid = rig.random.choice(sessions)[0]
                rig.bites += admin.execute("SELECT pg_terminate_backend(%s)", [pid]).rowcount
    rig.measure_recovery(time.monotonic(), 3.0, "the last cut")


@scenario("F6", "kill -9 of a server process, so that all of them restart", (POSTGRES,))
def server_processes_are_killed(rig: Rig) -> None:
    rig.expected_log = LEAVING
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(3.0, 6.0):
        with rig.outage(), psycopg.connect(rig.server.url, autocommit=True) as admin:
            sessions = admin.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'chaos%' ORDER BY pid"
            ).fetchall()
            rig.server.kill_backend(rig.random.choice(sessions)[0])
            with suppress(psycopg.OperationalError):
                admin.execute("SELECT pg_sleep(10)")  # until this one is ended, too
                rig.violate("the server outlived the death of one of its processes")
            rig.server.wait_until_up()
        rig.bite()
        rig.measure_recovery(time.monotonic(), 5.0, "a crash")


@scenario("F7", "pg_ctl stop -m immediate, then start", (POSTGRES,))
def server_crashes(rig: Rig) -> None:
    rig.expected_log = LEAVING
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(3.0, 6.0):
        with rig.outage():
            rig.server.stop("immediate")
            time.sleep(rig.random.uniform(0.0, 1.0))
            rig.server.start()
        rig.bite()
        rig.measure_recovery(time.monotonic(), 5.0, "a restart")


@scenario("F8", "no server for a long time", (POSTGRES,))
def server_is_absent(rig: Rig) -> None:
    rig.expected_log = LEAVING
    alone = rig.start_workers()
    supervised = rig.start_workers(processes=2)
    rig.put_steadily(rate=30.0)
    rig.warm_up()
    # Live jobs, which nobody may take away though no lease can be renewed.
    for _ in range(4):
        rig.oracle.put(Long(rig.oracle.number(), rig.seconds + 8))
    rig.wait_until(lambda: _live(rig) == 4, because="the long jobs run")
    leaving = rig.start_workers("--grace", f"{GRACE:g}")
    rig.oracle.stop()
    stopped_at = time.monotonic()
    rig.server.stop("fast")
    time.sleep(2.0)
    watched = [_Quiet(rig, tree) for tree in (alone, supervised)]
    for place, _ in enumerate(rig.moments(2.0, 3.0)):
        if place == 0:
            _leave_in_time(rig, leaving, stopped_at)
    for one in watched:
        one.check()
    rig.server.start()
    rig.bites = 1
    started_at = time.monotonic()
    connection.close()  # it died with the server
    rig.oracle.put(Work(rig.oracle.number()))
    rig.measure_recovery(started_at, 5.0, "the return of the server")


def _live(rig: Rig) -> int:
    from myxo_jobs.models import Job

    return Job.objects.filter(topic="chaos.Long", status="running").count()


def _leave_in_time(rig: Rig, tree: Tree, since: float) -> None:
    """Ask a tree to drain that has not reached the database since a moment.

    Its jobs run again after their leases.
    """
    seconds = GRACE + 2 + 1
    pids = {tree.pid, *tree.workers()}
    tree.send(signal.SIGTERM)
    code = tree.wait(seconds)
    rig.expect(code == 0, f"exit status {code} of a drain in {seconds:g} s without the database")
    rig.losses += [Loss("kill", pid, since, time.monotonic()) for pid in pids]
    rig.trees.remove(tree)
    rig.retired.append(tree)
    tree.kill()


class _Quiet:
    """How much a tree says and uses while there is nothing it can do."""

    def __init__(self, rig: Rig, tree: Tree) -> None:
        self._rig = rig
        self._tree = tree
        self._since = time.monotonic()
        self._lines = len(tree.log().splitlines())
        self._used = self._cpu_seconds()

    def _cpu_seconds(self) -> float:
        pids = {self._tree.pid, *self._tree.workers()}
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

    def check(self) -> None:
        took = time.monotonic() - self._since
        lines = self._tree.log().splitlines()[self._lines :]
        of_each = Counter(re.findall(r"worker=\S+", "\n".join(lines)))
        odd = [line for line in lines if "cannot reach the database" not in line]
        self._rig.expect(not odd, f"other lines while the server was away: {odd[:3]}")
        for worker, told in of_each.items():
            self._rig.expect(told <= took / 10 + 1, f"{told} lines of {worker} in {took:.0f} s")
        used = (self._cpu_seconds() - self._used) / took
        processes = len({self._tree.pid, *self._tree.workers()})
        self._rig.expect(
            used < 0.01 * processes, f"{used:.1%} of a core used by {processes} processes"
        )


@scenario("F9", "no server at the start of the workers", (POSTGRES,))
def server_is_not_there_yet(rig: Rig) -> None:
    rig.expected_log = LEAVING
    rig.server.stop("fast")
    trees = [rig.start_workers(wait=False), rig.start_workers(processes=2, wait=False)]
    time.sleep(3.0)
    watched = [_Quiet(rig, tree) for tree in trees]
    time.sleep(rig.seconds)
    for one, tree in zip(watched, trees, strict=True):
        rig.expect("cannot reach the database" in tree.log(), "no clear line at the start")
        rig.expect(tree.is_alive, "a worker ended since the server was not there")
        one.check()
    rig.server.start()
    rig.bites = len(trees)
    started_at = time.monotonic()
    rig.put_steadily()
    rig.measure_recovery(started_at, 5.0, "the start of the server")
    rig.warm_up()


@scenario("F36", "no session left on the server", (POSTGRES,))
def sessions_run_out(rig: Rig) -> None:
    rig.expected_log = [*LEAVING, r"FATAL:  sorry, too many clients already"]
    connection.close()
    rig.server.stop("fast")
    rig.server.start(max_connections=20, superuser_reserved_connections=0)
    few = ("--topics", "chaos.Work,chaos.Long", "--workers", "1")
    rig.start_workers(*few, MYXO_CHAOS_NAME="chaos-alone")
    rig.start_workers(*few, processes=1, MYXO_CHAOS_NAME="chaos-supervised")
    limited = _Limited(rig, few)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    for place, _ in enumerate(rig.moments(0.5, 1.5)):
        rig.expect(_sessions("chaos-alone") <= 3 + 2, "a process has over three sessions")
        rig.expect(_sessions("chaos-supervised") <= 3 + 2 + 1, "or its supervisor over one")
        if place % 3 == 2:
            limited.strike(LEASE * rig.random.uniform(0.5, 1.5))
            continue
        sleepers = []
        with suppress(psycopg.OperationalError):
            while True:
                sleepers.append(psycopg.connect(rig.server.url))
        until = time.monotonic() + LEASE * rig.random.uniform(0.5, 1.5)
        while time.monotonic() < until:
            with suppress(psycopg.OperationalError):
                sleepers.append(psycopg.connect(rig.server.url))
            time.sleep(0.01)
        for sleeper in sleepers:
            sleeper.close()
        rig.bites += bool(sleepers)
        rig.measure_recovery(time.monotonic(), 5.0, "sessions were free again")


class _Limited:
    """A worker whose role may have only so many sessions."""

    def __init__(self, rig: Rig, options: tuple[str, ...]) -> None:
        self._rig = rig
        rig.expected_log += [r"FATAL:  too many connections for role"]
        self._set_limit("CREATE ROLE limited LOGIN CONNECTION LIMIT 5")
        self._set_limit("GRANT ALL ON ALL TABLES IN SCHEMA public TO limited")
        self._set_limit("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO limited")
        url = rig.server.url.replace("postgres@", "limited@")
        self._tree = rig.start_workers(
            *options, MYXO_TEST_POSTGRES=url, MYXO_CHAOS_NAME="chaos-limited"
        )

    def strike(self, seconds: float) -> None:
        """Leave the worker a single session for so long."""
        refused = self._rig.server.log().count("too many connections for role")
        self._set_limit("ALTER ROLE limited CONNECTION LIMIT 1")
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'limited'"
            )
        time.sleep(seconds)
        self._set_limit("ALTER ROLE limited CONNECTION LIMIT 5")
        log = self._rig.server.log()
        self._rig.bites = (self._rig.bites or 0) + log.count("for role") - refused
        lifted_at = time.monotonic()
        self._rig.wait_until(
            lambda: any(
                line.pid == self._tree.pid and line.at > lifted_at for line in self._rig.begun()
            ),
            because="the limited worker runs jobs again",
            within=5,
        )

    def _set_limit(self, statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)


def _sessions(name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name])
        return int(cursor.fetchone()[0])


@scenario("F38", "statement, lock and idle timeouts of 200 ms to 1 s", (POSTGRES,))
def statements_time_out(rig: Rig) -> None:
    cut = [
        r"ERROR:  canceling statement due to (statement|lock) timeout",
        # None of them was idle in a transaction.
        r"FATAL:  terminating connection due to idle-session timeout",
    ]
    rig.expected_log = [*LEAVING, *cut]
    limits = {
        "statement_timeout": "200ms",
        "lock_timeout": "100ms",
        "idle_in_transaction_session_timeout": "500ms",
        "idle_session_timeout": "1s",
    }
    with _admin(rig) as admin:
        for name, value in limits.items():
            admin.execute(f"ALTER ROLE postgres SET {name} = '{value}'")
        rig.start_workers()
        rig.start_workers(processes=2)
        rig.put_steadily(make=mixed_work)
        rig.warm_up()
        Jobs().put_many([Work(rig.oracle.number()) for _ in range(BACKLOG)])
        for _ in rig.moments(0.5, 1.5):
            with admin.transaction():
                admin.execute("LOCK TABLE myxo_jobs IN ACCESS EXCLUSIVE MODE")
                time.sleep(rig.random.uniform(0.1, 0.5))
        rig.measure_recovery(time.monotonic(), 5.0, "the last lock")
    log = rig.server.log()
    rig.bites = sum(
        log.count(kind) for kind in ("statement timeout", "lock timeout", "idle-session")
    )


@contextmanager
def _admin(rig: Rig) -> Iterator[psycopg.Connection[Any]]:
    """Connect as somebody whom no timeout meets."""
    options = "-c statement_timeout=0 -c lock_timeout=0 -c idle_session_timeout=0"
    options += " -c idle_in_transaction_session_timeout=0"
    with psycopg.connect(rig.server.url, autocommit=True, options=options) as admin:
        yield admin


@scenario("F39", "the table locked for longer than a lease, as by a migration", (POSTGRES,))
def table_is_locked(rig: Rig) -> None:
    rig.start_workers()
    rig.start_workers(processes=2)
    leaving = [
        rig.start_workers("--grace", f"{GRACE:g}"),
        rig.start_workers("--grace", f"{GRACE:g}", processes=2),
    ]
    rig.put_steadily(make=_long_work)
    rig.warm_up()
    rig.bites = 0
    with _admin(rig) as admin:
        for _ in rig.moments(1.0, 2.0):
            with admin.transaction():
                admin.execute("LOCK TABLE myxo_jobs IN ACCESS EXCLUSIVE MODE")
                if rig.bites == 0:
                    locked_at = time.monotonic()
                    time.sleep(0.5)
                    for tree in leaving:
                        _leave_in_time(rig, tree, locked_at)
                time.sleep(LEASE * rig.random.uniform(1.2, 2.5))
            rig.bite()
            rig.measure_recovery(time.monotonic(), 5.0, "the lock")


def _long_work(number: int, chance: Random) -> Any:
    """Return short jobs, and many that outlast a lock of the table."""
    if number % 40 == 0:
        return Long(number, seconds=LEASE * chance.uniform(3.0, 4.0))
    return short_work(number, chance)


@scenario(
    "F40", "bulk retries, discards, writes and rescues at once, in opposite orders", (POSTGRES,)
)
def bulk_work_meets_itself(rig: Rig) -> None:
    rig.start_workers()
    supervised = rig.start_workers(processes=2)
    rig.put_steadily(make=_failing_work)
    rig.warm_up()
    rig.bites = 0

    def serve(act: Callable[[Random], int]) -> None:
        chance = Random(f"{rig.seed} {act.__name__}")
        while not rig.is_over():
            rig.bites = (rig.bites or 0) + act(chance)
            time.sleep(0.02)
        connection.close()

    def retry(chance: Random) -> int:
        from myxo_jobs import queue

        again = queue.retry_failed("default", _some(chance))
        rig.run_again.update(again)
        return len(again)

    def discard(chance: Random) -> int:
        from myxo_jobs import queue

        gone = queue.discard("default", _some(chance)[:20])
        rig.discarded.update(gone)
        return len(gone)

    def touch(chance: Random) -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE myxo_jobs SET priority = priority WHERE id = ANY (%s) AND worker = ''",
                [_some(chance)],
            )
            return int(cursor.rowcount)

    def rescue(chance: Random) -> int:
        """Kill a worker: what it held is given back, and charged, by its supervisor."""
        time.sleep(1.0)
        if children := supervised.workers():
            rig.kill(chance.choice(children), within=None)
        return 1

    actions = [retry, discard, touch, retry, touch, rescue]
    with ThreadPoolExecutor(len(actions)) as pool:
        list(pool.map(serve, actions))
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM myxo_jobs WHERE failed RETURNING id")
        rig.discarded.update(row[0] for row in cursor.fetchall())


def _failing_work(number: int, chance: Random) -> Any:
    return Dirt(number, "missing") if number % 3 == 0 else short_work(number, chance)


def _some(chance: Random) -> list[int]:
    from myxo_jobs.models import Job

    ids = list(Job.objects.values_list("pk", flat=True)[:500])
    chance.shuffle(ids)
    return ids
