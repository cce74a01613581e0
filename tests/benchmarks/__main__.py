"""How fast is it? `python -m tests.benchmarks [SCENARIO…] [--db postgres|sqlite]`.

Each scenario interleaves ours, the raw limit and, with `--peers`, other queues over several
rounds of one run, on a database that flushes each commit to the drive as it does by
default. It prints medians, and whether they reach their marks. A run in which a job was
lost or ran twice is void.

With `--json F` the reports are added to those in F, and `--markdown PAGE` writes the
table of all that F holds into a page. Exits 1 where a mark is missed or a run is void.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks import database
from tests.benchmarks.bench import BOTH, SCENARIOS, Bench, Scenario
from tests.benchmarks.reports import Report


def main() -> None:
    arguments = _arguments()
    if arguments.db is None:
        # The settings of a process know one database: each gets a process of its own.
        runs = [
            [sys.executable, "-m", "tests.benchmarks", *sys.argv[1:], "--db", db] for db in BOTH
        ]
        sys.exit(max(subprocess.call(run) for run in runs))
    with ExitStack() as stack:
        database.choose(arguments.db, stack)
        sys.exit(_run(arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="*", help="all of them if none is named")
    parser.add_argument("--db", choices=BOTH, help="both, one after the other, if not given")
    parser.add_argument("--peers", action="store_true", help="beside other queues, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the number of jobs: 0.1 for a quick look"
    )
    parser.add_argument("--list", action="store_true", help="say which scenarios there are")
    parser.add_argument("--json", type=Path, help="add the reports to those in this file")
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> int:
    import django

    django.setup()
    from tests.benchmarks import machine, pages, peers, scenarios

    assert scenarios.__all__
    if arguments.list:
        for one in SCENARIOS.values():
            print(f"{one.name:14} {', '.join(one.databases):17} {one.what}")
        return 0
    chosen = _chosen(arguments)
    database.prepare()
    line = machine.describe()
    if arguments.scale != 1.0:
        line += f", at a scale of {arguments.scale:g}"
    print(line, flush=True)
    bench = Bench(arguments.db, arguments.rounds, arguments.scale)
    if arguments.peers:
        bench = peers.install(bench)
    reports = []
    for one in chosen:
        report = _measure(one, bench, line)
        print("\n".join(report.lines()), flush=True)
        reports.append(report)
        if arguments.json:
            pages.add_to(arguments.json, [report])
    _close_connections()
    if arguments.markdown:
        pages.write_table(arguments.markdown, pages.read(arguments.json))
    return 0 if all(report.passed for report in reports) else 1


def _chosen(arguments: argparse.Namespace) -> list[Scenario]:
    unknown = set(arguments.scenario) - set(SCENARIOS)
    if unknown:
        sys.exit(f"no scenario {', '.join(sorted(unknown))}; --list says which there are")
    names = arguments.scenario or list(SCENARIOS)
    return [SCENARIOS[name] for name in names if arguments.db in SCENARIOS[name].databases]


def _measure(one: Scenario, bench: Bench, machine: str) -> Report:
    from tests.benchmarks.evidence import Void
    from tests.benchmarks.peers import DJANGO_PEER_NAMES

    report = Report(one.name, database.label(bench.database), one.what, machine)
    try:
        one.measure(bench, report)
    except Void as void:
        report.void = str(void)
    report.judge(one.marks[bench.database], DJANGO_PEER_NAMES)
    return report


def _close_connections() -> None:
    from django.db import connections

    connections.close_all()


if __name__ == "__main__":
    main()
