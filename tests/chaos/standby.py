"""A primary that dies, and its standby that takes its place."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import psycopg
from django.db import connections

from tests.chaos.database import LEAVING
from tests.chaos.rig import POSTGRES, Rig, mixed_work
from tests.chaos.scenario import scenario
from tests.chaos.server import Server

# How soon work goes on after the death of the primary.
RECOVERY_SECONDS = 10.0

# What the standby says when it loses its primary, and when it is promoted.
LOSING_THE_PRIMARY = [
    r"FATAL:  could not receive data from WAL stream",
    r"FATAL:  streaming replication receiver .* could not connect to the primary server",
    r"FATAL:  terminating walreceiver process due to administrator command",
]


@scenario(
    "standby", "kill -9 of the primary, and pg_promote of its synchronous standby", (POSTGRES,)
)
def standbys_are_promoted(rig: Rig) -> None:
    rig.expected_log = [*LEAVING, *LOSING_THE_PRIMARY]
    primary, standby = rig.server, Server(None)
    rig.surroundings.callback(standby.remove)
    standby.log_file = primary.log_file
    options = _know_both(primary, standby)
    rig.start_workers(MYXO_CHAOS_OPTIONS=options)
    rig.start_workers(processes=2, MYXO_CHAOS_OPTIONS=options)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(0.5, 1.5):
        _follow(standby, primary)
        time.sleep(rig.random.uniform(2.0, 4.0))
        killed_at = time.monotonic()
        with rig.outage():
            primary.kill()
            _ask(standby, "SELECT pg_promote()")
            promoted_at = time.monotonic()
        primary, standby = standby, primary
        rig.server = primary
        rig.bite()
        _measure_recovery(rig, killed_at, promoted_at)


def _measure_recovery(rig: Rig, killed_at: float, promoted_at: float) -> None:
    """Wait until a job begins that the new primary took; what was claimed before goes on."""

    def begun() -> list[float]:
        new = {put.job_id for put in rig.oracle.puts if put.job_id and put.at > promoted_at}
        return [line.at for line in rig.begun() if line.job in new and line.at > promoted_at]

    if found := rig.wait_until(begun, because="a new job begins", within=3 * RECOVERY_SECONDS):
        took = min(found) - killed_at
        rig.recoveries.append(took)
        rig.expect(took <= RECOVERY_SECONDS, f"work went on {took:.1f} s after the death")


def _know_both(primary: Server, standby: Server) -> str:
    """Give both servers to this process and its workers; return the workers' OPTIONS."""
    hosts = f"{primary.folder},{standby.folder}"
    options = {"target_session_attrs": "read-write"}
    connections.close_all()
    ours = connections.settings["default"]
    ours["HOST"] = hosts
    ours["OPTIONS"] |= options
    os.environ["MYXO_TEST_POSTGRES"] = f"postgresql://postgres@/postgres?host={hosts}"
    return json.dumps(options)


def _follow(standby: Server, primary: Server) -> None:
    """Make a server the synchronous standby of another: from now on a put waits for it."""
    standby.copy(primary)
    _ask(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
    _ask(primary, "SELECT pg_reload_conf()")
    deadline = time.monotonic() + 30
    while _ask(primary, "SELECT sync_state FROM pg_stat_replication") != "sync":
        if time.monotonic() > deadline:
            raise RuntimeError("the standby does not follow")
        time.sleep(0.05)


def _ask(server: Server, statement: str) -> Any:
    with psycopg.connect(server.url, autocommit=True) as admin:
        cursor = admin.execute(statement)
        row = cursor.fetchone() if cursor.description else None
    return row[0] if row else None
