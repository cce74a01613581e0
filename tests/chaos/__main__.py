"""Do what breaks queues, for real, and check that nothing was lost.

python -m tests.chaos --ci
python -m tests.chaos --all
python -m tests.chaos --seed 7 --minutes 5 F1 F7
python -m tests.chaos --controls
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.chaos.catalogue import CI, SCENARIOS, Scenario
from tests.chaos.controls import CONTROLS
from tests.chaos.invariants import Report
from tests.chaos.run import Order
from tests.chaos.server import Server

SECONDS = 20.0
CI_SEED = 1
# A run that hangs is ended so long after its time.
SPARE_SECONDS = 300.0


def main() -> None:
    arguments = _arguments()
    if arguments.list:
        for one in SCENARIOS.values():
            print(f"{one.fault:4} {', '.join(one.databases):17} {one.what}")
        return
    seed = arguments.seed
    if seed is None:
        seed = CI_SEED if arguments.ci else random.SystemRandom().randrange(10_000)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="myxo-chaos-") as folder:
        seconds = arguments.minutes * 60 or SECONDS
        suite = Suite(seed, seconds, arguments.db, Path(folder), arguments.at_once)
        if arguments.controls:
            sys.exit(suite.run_controls(arguments.without or list(CONTROLS)))
        for name in arguments.without:
            os.environ["MYXO_CHAOS_CONTROL"] = name
        sys.exit(suite.run([SCENARIOS[fault] for fault in _faults(arguments)]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="*", choices=[[], *SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--all", action="store_true", help="every scenario")
    parser.add_argument("--ci", action="store_true", help=f"these, with one seed: {', '.join(CI)}")
    parser.add_argument("--list", action="store_true", help="say which scenarios there are")
    parser.add_argument("--seed", type=int, help="of the schedule; one that failed replays it")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help=f"of each run; {SECONDS:g} s if it is not given"
    )
    parser.add_argument("--db", choices=["postgres", "sqlite"], help="only on this one")
    parser.add_argument("--at-once", type=int, default=1, help="so many runs, for a quicker end")
    parser.add_argument(
        "--without", action="append", default=[], choices=list(CONTROLS), help="switch a guard off"
    )
    parser.add_argument(
        "--controls", action="store_true", help="switch each guard off: the runs must then fail"
    )
    return parser.parse_args()


def _faults(arguments: argparse.Namespace) -> Iterable[str]:
    if arguments.all:
        return SCENARIOS
    if arguments.ci:
        return CI
    if not arguments.scenario and arguments.without:
        return CONTROLS[arguments.without[0]].faults
    if not arguments.scenario:
        sys.exit("name scenarios, or --all, --ci, --controls or --list")
    return list(arguments.scenario)


class Suite:
    """Runs of scenarios, one after the other, each in a process of its own."""

    def __init__(
        self, seed: int, seconds: float, database: str | None, folder: Path, at_once: int
    ) -> None:
        self._seed = seed
        self._seconds = seconds
        self._database = database
        self._at_once = at_once
        self._template = folder / "template"
        if database != "sqlite":
            Server.make_template(self._template)

    def run(self, scenarios: Iterable[Scenario]) -> int:
        """Run scenarios on their databases; return 0 if all passed."""
        runs = [
            (scenario, database)
            for scenario in scenarios
            for database in scenario.databases
            if self._database in (None, database)
        ]
        with ThreadPoolExecutor(self._at_once) as pool:
            reports = list(pool.map(lambda run: self.run_one(*run), runs))
        print()
        _print_table(reports)
        return 0 if reports and all(report.verdict == "passed" for report in reports) else 1

    def run_controls(self, names: Iterable[str]) -> int:
        """Run with each guard switched off; return 0 if every such run failed."""
        went_unnoticed = []
        for name in names:
            os.environ["MYXO_CHAOS_CONTROL"] = name
            print(f"without {CONTROLS[name].what}", flush=True)
            for fault in CONTROLS[name].faults:
                for database in SCENARIOS[fault].databases:
                    if self._database in (None, database):
                        report = self.run_one(SCENARIOS[fault], database)
                        if report.verdict != "FAILED":
                            went_unnoticed.append(f"{name} in {fault} on {database}")
        print(f"not noticed: {', '.join(went_unnoticed) or 'none'}")
        return 1 if went_unnoticed else 0

    def run_one(self, scenario: Scenario, database: str) -> Report:
        """Run a scenario on one database, and say how it went."""
        folder = Path(tempfile.mkdtemp(prefix=f"myxo-chaos-{scenario.fault}-{database}-"))
        folder.chmod(0o755)
        order = Order(
            scenario.fault, database, self._seed, self._seconds, str(folder), str(self._template)
        )
        began = time.monotonic()
        report = self._run_in_a_process(order)
        took = time.monotonic() - began
        lines = [
            f"{scenario.fault} on {database}: {scenario.what}",
            f"{report.verdict} in {took:.0f} s, {', '.join(report.notes)}",
            *report.violations,
        ]
        if report.verdict == "passed":
            shutil.rmtree(folder)
        else:
            lines.append(f"evidence in {folder}")
        print("\n  ".join(lines), flush=True)
        return report

    def _run_in_a_process(self, order: Order) -> Report:
        command = [sys.executable, "-m", "tests.chaos.run", msgspec.json.encode(order).decode()]
        log = Path(order.folder, "run.log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                process.wait(order.seconds + SPARE_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()  # it ends its workers and its server
                process.wait()
        if order.report.exists():
            return msgspec.json.decode(order.report.read_bytes(), type=Report)
        end = log.read_text(errors="replace")[-3000:]
        what = f"the run itself ended with status {process.returncode}:\n{end}"
        return Report(order.fault, order.database, order.seed, 0, 0, 0, 0, None, [what])


def _print_table(reports: list[Report]) -> None:
    columns = (
        "fault", "database", "seed", "bites", "puts", "lost", "run twice", "slowest recovery",
        "verdict",
    )  # fmt: skip
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for one in reports:
        slowest = "" if one.slowest_recovery is None else f"{one.slowest_recovery:.2f} s"
        cells = (
            one.fault, one.database, one.seed, one.bites, one.puts, one.lost, one.run_twice,
            slowest, one.verdict,
        )  # fmt: skip
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


if __name__ == "__main__":
    main()
