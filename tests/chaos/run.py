"""One run of one scenario on one database: what `python -m tests.chaos` starts for each."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from tests.chaos.server import Server
from tests.ledger import VARIABLE


class Order(msgspec.Struct, frozen=True):
    """What to run, and where."""

    fault: str
    database: str
    seed: int
    seconds: float
    folder: str  # for its evidence
    template: str  # of a server's data

    @property
    def report(self) -> Path:
        return Path(self.folder, "report.json")


def run(order: Order) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("it took too long"))
    # Under nohup it is ignored, and would be by the workers; a function is not inherited.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    with ExitStack() as stack:
        server = _choose_database(order, stack)
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        from tests.chaos import invariants, kills
        from tests.chaos.catalogue import SCENARIOS
        from tests.chaos.rig import Rig

        rig = Rig(order.fault, order.database, order.seed, order.seconds, Path(order.folder))
        stack.callback(rig.end)
        if server is not None:
            rig.server = server
        try:
            {**SCENARIOS, **kills.SCENARIOS}[order.fault].inject(rig)
        finally:
            rig.oracle.stop()
        rig.wait_until_drained()
        report = invariants.Check(rig).report()
        Path(order.folder, "losses.json").write_bytes(msgspec.json.encode(rig.losses))
        order.report.write_bytes(msgspec.json.encode(report))


def _choose_database(order: Order, stack: ExitStack) -> Server | None:
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
        "MYXO_TEST_DATABASE": order.database,
        VARIABLE: f"{order.folder}/ledger",
        "PYTHONUNBUFFERED": "1",
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # jobs will crash, as they are meant to
    if order.database == "sqlite":
        names = {"default": f"{order.folder}/queue.sqlite3"}
        os.environ["MYXO_TEST_NAMES"] = json.dumps(names)
        return None
    server = Server(Path(order.template))
    stack.callback(server.remove)
    server.start()
    os.environ["MYXO_TEST_POSTGRES"] = server.url
    return server


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Order))
