"""Faults of a pooler: restarts, new sessions, pauses, and no connection left."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import psycopg
from django.db import connection

from tests.chaos.jobs import LEASE
from tests.chaos.rig import POSTGRES, Rig, mixed_work
from tests.chaos.scenario import scenario
from tests.pgbouncer import Pgbouncer, find

CLIENTS = 60
POOL = 2


@scenario(
    "F37",
    "pgbouncer in transaction mode: restarts, RECONNECT, PAUSE, no connection left",
    (POSTGRES,),
)
def pooler_is_restarted(rig: Rig) -> None:
    if find() is None:
        rig.bites = 0
        rig.notes.append("cannot be injected: pgbouncer is not installed")
        return
    pooler = Pooler(rig)
    faults = [pooler.restart, pooler.kill, pooler.reconnect, pooler.pause, pooler.crowd]
    rig.start_workers(**pooler.environment)
    rig.start_workers(processes=2, **pooler.environment)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    round_ = list(faults)
    for _ in rig.moments(0.5, 1.5):
        # Each of them, in another order every time.
        fault = round_.pop(rig.random.randrange(len(round_)))
        round_ = round_ or list(faults)
        print(f"{time.monotonic():.2f} {fault.__name__}", flush=True)
        fault()
        print(f"{time.monotonic():.2f} over", flush=True)
        rig.bite()
        rig.measure_recovery(time.monotonic(), 5.0, fault.__name__)


class Pooler:
    """A pgbouncer through which the workers and those who put reach the server."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._bouncer = Pgbouncer(rig.server.url)
        rig.at_end.append(self._bouncer.remove)
        rig.notes.append(f"pgbouncer {'.'.join(map(str, self._bouncer.version))}")
        self._start()
        connection.close()
        connection.settings_dict |= {
            "HOST": str(self._bouncer.folder),
            "PORT": str(self._bouncer.port),
            "DISABLE_SERVER_SIDE_CURSORS": True,
        }

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to go through it."""
        return {"MYXO_TEST_DATABASE": "pgbouncer", "MYXO_TEST_PGBOUNCER": self._bouncer.url}

    def _start(self) -> None:
        settings = {"default_pool_size": POOL, "max_client_conn": CLIENTS}
        if self._bouncer.can_prepare:
            settings["max_prepared_statements"] = self._rig.random.choice([0, 200])
        self._bouncer.configure(**settings)
        self._bouncer.start()

    def restart(self) -> None:
        self._bouncer.stop(signal.SIGTERM)
        time.sleep(self._rig.random.uniform(0.0, 1.0))
        self._start()

    def kill(self) -> None:
        self._bouncer.stop(signal.SIGKILL)
        time.sleep(self._rig.random.uniform(0.0, 1.0))
        self._start()

    def reconnect(self) -> None:
        self._bouncer.command("RECONNECT")

    def pause(self) -> None:
        """Let statements wait, for longer than a lease sometimes."""
        self._bouncer.command("PAUSE")
        time.sleep(LEASE * self._rig.random.uniform(0.1, 1.5))
        self._bouncer.command("RESUME")

    def crowd(self) -> None:
        """Start it again and leave no connection for the others."""
        self._bouncer.stop(signal.SIGKILL)
        self._start()
        until = time.monotonic() + LEASE * self._rig.random.uniform(0.5, 1.5)
        sleepers = []
        while time.monotonic() < until:
            with suppress(psycopg.OperationalError):
                sleepers.append(psycopg.connect(self._bouncer.url))
                continue
            time.sleep(0.01)
        for sleeper in sleepers:
            sleeper.close()
