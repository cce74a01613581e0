"""Kill worker processes of other queues, too: the same moments, the same jobs, PostgreSQL.

python -m tests.chaos.peers                  # all; needs the extra `bench`, and Django 6
python -m tests.chaos.peers procrastinate --seed 7
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec

from tests.chaos.peers.run import Order, Outcome
from tests.chaos.server import Server
from tests.ledger import VARIABLE

# What to run: distribution, module, name in it.
PEERS = {
    "myxo-jobs": ("myxo-jobs", "tests.chaos.peers.myxo_jobs", "PEER"),
    "myxo-jobs-supervised": ("myxo-jobs", "tests.chaos.peers.myxo_jobs", "SUPERVISED"),
    "django-tasks-db": ("django-tasks-db", "tests.chaos.peers.django_tasks_db", "PEER"),
    "procrastinate": ("procrastinate", "tests.chaos.peers.procrastinate", "PEER"),
    "django-q2": ("django-q2", "tests.chaos.peers.django_q2", "PEER"),
    "django-ox": ("django-ox", "tests.chaos.peers.django_ox", "PEER"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peer", nargs="*", choices=[[], *PEERS], metavar="PEER")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--minutes", type=float, default=1.0, help="of kills")
    parser.add_argument("--rate", type=float, default=20.0, help="puts a second")
    parser.add_argument("--wait", type=float, default=5.0, help="minutes for what has not ended")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.rate:g} puts/s", flush=True)
    with tempfile.TemporaryDirectory(prefix="myxo-peers-") as folder:
        Server.make_template(Path(folder, "template"))
        outcomes = {
            name: _run(name, arguments, Path(folder)) for name in arguments.peer or list(PEERS)
        }
    _print_table(outcomes)


def _run(name: str, arguments: argparse.Namespace, folder: Path) -> Outcome:
    distribution, module, peer = PEERS[name]
    own = folder / name
    own.mkdir()
    order = Order(
        module, peer, arguments.seed, arguments.minutes * 60, arguments.rate,
        arguments.wait * 60, str(own),
    )  # fmt: skip
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.chaos.peers.settings",
        "MYXO_PEER": distribution,
        "MYXO_TEST_DATABASE": "postgres",
        VARIABLE: str(own / "ledger"),
    }
    command = [sys.executable, "-m", "tests.chaos.peers.run", msgspec.json.encode(order).decode()]
    server = Server(folder / "template")
    try:
        server.start()
        environment["MYXO_TEST_POSTGRES"] = server.url
        with Path(own, "run.log").open("wb") as log:
            subprocess.run(command, check=True, env=environment, stdout=log, stderr=log)
    except BaseException:
        kept = tempfile.mkdtemp(prefix=f"myxo-peer-{name}-")
        shutil.copytree(own, kept, dirs_exist_ok=True)
        print(f"evidence in {kept}", file=sys.stderr)
        raise
    finally:
        server.remove()
    outcome = msgspec.json.decode((own / "outcome.json").read_bytes(), type=Outcome)
    print(f"{name}: {msgspec.json.encode(outcome).decode()}", flush=True)
    return outcome


def _print_table(outcomes: dict[str, Outcome]) -> None:
    columns = (
        "queue", "its workers", "puts", "kills", "runs interrupted", "never run",
        "not run again", "run twice beyond kills", "median recovery", "slowest recovery",
    )  # fmt: skip
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for name, one in outcomes.items():
        distribution = PEERS[name][0]
        cells = (
            f"{distribution} {version(distribution)}", one.what, one.puts, one.kills,
            one.interrupted, one.never_started, one.not_run_again, one.twice,
            _seconds(one.median_recovery), _seconds(one.slowest_recovery),
        )  # fmt: skip
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    main()
