"""Minutes of kills: a random worker process every half second, under a steady load.

python -m tests.chaos.kills
python -m tests.chaos.kills --minutes 1 --db sqlite --plain --seed 7
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.__main__ import Suite
from tests.chaos.invariants import Report
from tests.chaos.jobs import SHORT_LEASE, Leased, Short
from tests.chaos.oracle import ROLLBACKS
from tests.chaos.rig import Rig
from tests.chaos.scenario import BOTH, Scenario

PUTS_A_SECOND = 200.0
KILL_EVERY_SECONDS = 0.5
PROCESSES = 2
# Each start imports the whole project, for half a second of a core: of two, one would
# mostly be starting.
PLAIN_PROCESSES = 4
# How soon a job that a kill interrupted begins again.
SUPERVISED_WITHIN = 1.0
PLAIN_WITHIN = SHORT_LEASE + 2.0


def under_a_supervisor(rig: Rig) -> None:
    rig.recovers_at_once = True
    tree = rig.start_workers(processes=PROCESSES)
    rig.put_steadily(_rate(), lambda number, chance: Short(number))
    rig.warm_up()
    for _ in _moments(rig):
        if workers := tree.workers():
            rig.kill(rig.random.choice(workers), within=SUPERVISED_WITHIN)


def alone(rig: Rig) -> None:
    rig.recovers_at_once = True
    trees = [rig.start_workers() for _ in range(PLAIN_PROCESSES)]
    rig.put_steadily(_rate(), lambda number, chance: Leased(number))
    rig.warm_up()
    for _ in _moments(rig):
        tree = rig.random.choice(trees)
        rig.kill(tree.pid, within=PLAIN_WITHIN)
        tree.wait(5)
        tree.start()


def _moments(rig: Rig) -> Iterator[None]:
    """Yield every so many seconds; a moment that the rig has missed is not made up for."""
    following = time.monotonic()
    while not rig.is_over():
        following = max(following + KILL_EVERY_SECONDS, time.monotonic())
        time.sleep(max(following - time.monotonic(), 0.0))
        yield


def _rate() -> float:
    return PUTS_A_SECOND / (1 - ROLLBACKS)


SCENARIOS = {
    one.fault: one
    for one in (
        Scenario("supervised", f"runjobs --processes {PROCESSES}", BOTH, under_a_supervisor),
        Scenario("plain", f"{PLAIN_PROCESSES} x runjobs, lease={SHORT_LEASE:g}", BOTH, alone),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of each run")
    parser.add_argument("--db", choices=BOTH, help="only on this one")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--plain", action="store_const", dest="way", const="plain", help="without a supervisor"
    )
    ways.add_argument(
        "--supervised", action="store_const", dest="way", const="supervised", help="only with one"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="myxo-chaos-") as folder:
        suite = Suite(arguments.seed, arguments.minutes * 60, arguments.db, Path(folder), 1)
        reports = [
            suite.run_one(scenario, database)
            for way, scenario in SCENARIOS.items()
            for database in BOTH
            if arguments.way in (None, way) and arguments.db in (None, database)
        ]
    print()
    _print_table(reports)
    sys.exit(0 if all(report.verdict == "passed" for report in reports) else 1)


def _print_table(reports: list[Report]) -> None:
    columns = (
        "workers", "database", "seed", "puts", "kills", "runs interrupted", "lost",
        "failed unrun", "unexplained second starts", "median recovery", "slowest recovery",
        "verdict",
    )  # fmt: skip
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for one in reports:
        cells = (
            SCENARIOS[one.fault].what, one.database, one.seed, one.puts, one.kills,
            one.interrupted, one.lost, one.failed_unrun, one.unexplained,
            _seconds(one.median_recovery), _seconds(one.slowest_recovery), one.verdict,
        )  # fmt: skip
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    main()
