"""How fast is it? `python -m tests.benchmarks [SCENARIO…] [--db postgres|sqlite]`.

Each scenario interleaves ours and the raw limit over several rounds of one run, on a
database that flushes each commit to the drive as it does by default, and prints medians
and their ratio. A round in which a job was lost or ran twice is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.postgres_server import postgres_server


def main() -> None:
    arguments = _arguments()
    with ExitStack() as stack:
        _choose_database(arguments.db, stack)
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        _print_machine(arguments.db)
        from tests.benchmarks import scenarios

        results = {}
        for name in arguments.scenario or scenarios.SCENARIOS:
            results[name] = _measure(name, arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2))
        from django.db import connections

        connections.close_all()
    missed = [name for name, result in results.items() if result["ours"] < arguments.at_least]
    if missed:
        sys.exit(f"below {arguments.at_least:,} jobs/s: {', '.join(missed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("scenario", nargs="*", help="all of them if none is named")
    parser.add_argument("--db", choices=("postgres", "sqlite"), default="postgres")
    parser.add_argument("--jobs", type=int, default=20_000, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument(
        "--at-least", type=float, default=0, help="exit 1 below so many jobs a second"
    )
    return parser.parse_args()


def _choose_database(name: str, stack: ExitStack) -> None:
    os.environ["MYXO_TEST_DATABASE"] = name
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    if name == "sqlite":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="myxo-benchmark-"))
        names = {alias: f"{folder}/{alias}.sqlite3" for alias in ("default", "other")}
        os.environ["MYXO_TEST_NAMES"] = json.dumps(names)
    elif not os.environ.get("MYXO_TEST_POSTGRES"):
        os.environ["MYXO_TEST_POSTGRES"] = stack.enter_context(postgres_server(flush=True))


def _print_machine(name: str) -> None:
    import django
    from django.db import connection

    version = f"SQLite {sqlite3.sqlite_version}"
    if name == "postgres":
        connection.ensure_connection()
        version = f"PostgreSQL {connection.pg_version // 10_000}"  # type: ignore[attr-defined]
    print(
        f"{version}, Python {platform.python_version()}, Django {django.__version__}, "
        f"{os.cpu_count()} cores, a flush of the drive takes {_flush_milliseconds():.2f} ms"
    )


def _flush_milliseconds() -> float:
    """Return the median time of a small write and its fsync."""
    times = []
    with tempfile.TemporaryFile() as file:
        for _ in range(50):
            began = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def _measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    from tests.benchmarks import scenarios

    ours, raw = scenarios.SCENARIOS[name]
    times: dict[str, list[float]] = {"ours": [], "raw": []}
    for _ in range(arguments.rounds):
        times["ours"].append(arguments.jobs / ours(arguments.jobs))
        times["raw"].append(arguments.jobs / raw(arguments.jobs))
    medians = {side: statistics.median(rates) for side, rates in times.items()}
    print(
        f"{name:12} ours {medians['ours']:10,.0f} jobs/s   raw {medians['raw']:10,.0f} jobs/s   "
        f"ratio {medians['ours'] / medians['raw']:.2f}   "
        f"(ours over {arguments.rounds} rounds: "
        f"{', '.join(f'{rate:,.0f}' for rate in times['ours'])})",
        flush=True,
    )
    return medians


if __name__ == "__main__":
    main()
