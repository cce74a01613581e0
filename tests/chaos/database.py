"""Faults of the server: sessions cut, crashes, absence."""

from __future__ import annotations

import time

import psycopg

from tests.chaos.rig import POSTGRES, Rig, mixed_work
from tests.chaos.scenario import scenario

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
