"""Dead rows that nothing may clean up, or that nothing cleans up."""

from __future__ import annotations

import re
import statistics
import time

import psycopg
from django.db import connection

from myxo_jobs import Jobs
from tests.chaos.jobs import Work
from tests.chaos.rig import POSTGRES, Rig, Tree
from tests.chaos.scenario import scenario

# Jobs at a time, that is 500 a second.
BURST, BURST_SECONDS = 250, 0.5
# The worker tells of what has lasted a minute.
SHORTEST_SECONDS = 75.0
LEAST_SHARE = 0.8  # of the rate at the start
CLAIM_P99_MS = 50.0
# So large a share of the statements is written into the server's log with its duration.
SAMPLE = 0.5
LOGGED = {
    "log_min_duration_sample": 0,
    "log_statement_sample_rate": SAMPLE,
    "max_prepared_transactions": 2,
}
# A claim that begins at the floors; a claim or look that begins at the beginning is a full
# pass, and these ask for the one topic.
CLAIM = re.compile(r"duration: ([\d.]+) ms  statement:\s+WITH RECURSIVE level AS")
FULL_PASS = re.compile(
    r"duration: ([\d.]+) ms  statement:\s+WITH RECURSIVE found\("
    r"(?:priority|topic[^{]*\{chaos\.Work\})"
)
FULL_PASS_SHARE = 0.1


@scenario(
    "F20", "old snapshots: a session and a prepared transaction left open under load", (POSTGRES,)
)
def old_snapshots(rig: Rig) -> None:
    tree = _start(rig)
    with _session(rig) as session, _session(rig) as other:
        session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        session.execute("SELECT 1")
        other.execute("BEGIN")
        other.execute("CREATE TABLE left_open ()")
        other.execute("PREPARE TRANSACTION 'left'")
        _work(rig, rig.seconds)
        holders = [
            f"SELECT pg_terminate_backend({session.info.backend_pid})",
            "ROLLBACK PREPARED 'left'",
        ]
        named = [holder for holder in holders if holder in tree.log()]
        rig.expect(len(named) == 1, f"{len(named)} warnings of what holds the dead rows")
        other.execute("ROLLBACK PREPARED 'left'")


@scenario("F21", "autovacuum held off by a lock, then switched off", (POSTGRES,))
def no_vacuum(rig: Rig) -> None:
    tree = _start(rig)
    with _session(rig) as session:
        session.execute("BEGIN")
        session.execute("LOCK TABLE myxo_jobs IN SHARE UPDATE EXCLUSIVE MODE")
        _work(rig, rig.seconds / 2)
        session.execute("ROLLBACK")
        session.execute("ALTER TABLE myxo_jobs SET (autovacuum_enabled = off)")
        _work(rig, rig.seconds / 2)
    told = tree.log().count("autovacuum is off")
    rig.expect(told == 1, f"{told} warnings of autovacuum that is off")


def _start(rig: Rig) -> Tree:
    """Start a server that logs durations, and a worker."""
    connection.close()
    rig.server.stop("fast")
    rig.server.start(**LOGGED)
    tree = rig.start_workers("--topics", "chaos.Work")
    rig.seconds = max(rig.seconds, SHORTEST_SECONDS)
    rig.put_steadily(rate=20.0, make=lambda number, chance: Work(number))
    rig.warm_up()
    rig.bites = 0
    return tree


def _session(rig: Rig) -> psycopg.Connection:
    return psycopg.connect(rig.server.url, autocommit=True)


def _work(rig: Rig, seconds: float) -> None:
    """Put many jobs for so long; check that they run as quickly at the end as at the start."""
    logged = len(rig.server.log())
    began = time.monotonic()
    bursts = int(seconds / BURST_SECONDS)
    for number in range(bursts):
        time.sleep(max(began + number * BURST_SECONDS - time.monotonic(), 0.0))
        Jobs().put_many([Work(rig.oracle.number()) for _ in range(BURST)])
        rig.bites = (rig.bites or 0) + BURST
    took = time.monotonic() - began
    moments = [line.at - began for line in rig.begun() if line.at > began]
    first = sum(moment < took / 3 for moment in moments)
    last = sum(2 * took / 3 <= moment < took for moment in moments)
    rig.expect(last >= LEAST_SHARE * first, f"{first} jobs in the first third, {last} in the last")

    log = rig.server.log()[logged:]
    claims = [float(taken) for taken in CLAIM.findall(log)]
    full = [float(taken) for taken in FULL_PASS.findall(log)]
    p99 = statistics.quantiles(claims, n=100)[98]
    rig.expect(p99 < CLAIM_P99_MS, f"p99 of a claim is {p99:.1f} ms, of {len(claims)}")
    share = sum(full) / SAMPLE / 1e3 / took
    rig.expect(share <= FULL_PASS_SHARE, f"full passes took {share:.0%} of the time")
    rig.notes.append(f"p99 of {len(claims)} claims {p99:.1f} ms, full passes {share:.1%}")
