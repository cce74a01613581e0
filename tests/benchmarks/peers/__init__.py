"""Other queues that keep their jobs in the same kind of database, measured in the same way.

Each has a script of ours here, with its best documented settings and persistent
connections, and a database of its own on the same server. All but Graphile Worker are in
the extra `bench`; that one npm installs (`npm install graphile-worker pg`), and
MYXO_BENCHMARK_NODE names the folder. A peer that is missing is left out, and the run
says so.

Their handlers write down that they began, as ours do. The time of a drain ends with the
start of the last job: what a peer writes after it is not held against it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from django.db import connection

from tests.benchmarks.bench import POSTGRES, SQLITE, Bench
from tests.benchmarks.evidence import RAN_FILE, Void
from tests.benchmarks.processes import Actor, Stage, program, python_actor
from tests.benchmarks.reports import Report

DATABASE = "MYXO_PEER_DATABASE"
NAME = "MYXO_PEER"
NODE = "MYXO_BENCHMARK_NODE"
HERE = Path(__file__).parent


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A queue, its package, how its worker is started, and how many jobs measure it.

    `module` is the script in this folder; `variables` go into its environment. `is_django`
    says that it comes with an integration for Django.
    """

    name: str
    package: str
    module: str
    worker: Sequence[str]
    jobs: int
    databases: Sequence[str] = (POSTGRES,)
    is_django: bool = False
    # Measured by drains alone: the same queue with other batches.
    is_variant: bool = False
    variables: dict[str, str] = {}

    @property
    def is_installed(self) -> bool:
        if self.module == "graphile":
            return bool(shutil.which("node")) and _node_modules(self.package).exists()
        return find_spec(self.package) is not None

    def environment(self) -> dict[str, str]:
        return {
            "DJANGO_SETTINGS_MODULE": "tests.benchmarks.peers.settings",
            NAME: self.package,
            DATABASE: self._database(),
            **self.variables,
        }

    def install(self) -> None:
        """Make its database and its tables."""
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(f"DROP DATABASE IF EXISTS {self._label()} WITH (FORCE)")
                cursor.execute(f"CREATE DATABASE {self._label()}")
        self._act("install")

    def empty(self) -> None:
        """Delete its jobs."""
        if connection.vendor == "postgresql":
            _truncate(self._database())
        else:
            _delete(self._database())

    def fill(self, count: int) -> None:
        """Let its queue hold so many jobs, numbered from 0."""
        self.empty()
        self._act("fill", count=count)

    def actor(self, verb: str, **arguments: object) -> Actor:
        """Return a process that puts: `put`, `put_many` or `put_at_a_pace`."""
        if self.module == "graphile":
            command = ["node", str(HERE / "graphile.mjs"), verb, json.dumps(arguments)]
            return Actor(command, self.environment() | {"NODE_PATH": str(_node_modules())})
        return python_actor(
            f"peers.putting.{verb}", self.environment(), peer=self.module, **arguments
        )

    @contextmanager
    def working(self) -> Iterator[Path]:
        """Run its worker; give the file in which its handlers write down that they began."""
        with tempfile.TemporaryDirectory(prefix="myxo-peer-") as folder:
            ran = Path(folder, "ran")
            environment = self.environment() | {
                RAN_FILE: str(ran),
                "NODE_PATH": str(_node_modules()),
            }
            with program(self.worker, until=None, environment=environment):
                yield ran

    def _act(self, verb: str, **arguments: object) -> None:
        with Stage() as stage:
            stage.perform(self.actor(verb, **arguments))

    def _label(self) -> str:
        return "peer_" + self.package.replace("-", "_")

    def _database(self) -> str:
        if connection.vendor == "sqlite":
            return str(Path(connection.settings_dict["NAME"]).with_name(f"{self._label()}.sqlite3"))
        server = urlsplit(os.environ["MYXO_TEST_POSTGRES"])
        return server._replace(path=f"/{self._label()}").geturl()


def _node_modules(package: str = "") -> Path:
    return Path(os.environ.get(NODE, "."), "node_modules", package).absolute()


def _truncate(database: str) -> None:
    import psycopg

    with psycopg.connect(database, autocommit=True) as session:
        rows = session.execute(
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema') "
            "AND tablename NOT LIKE '%migration%' AND tablename NOT LIKE 'django_%'"
            " OR tablename LIKE 'django_tasks%' OR tablename LIKE 'django_ox%'"
        ).fetchall()
        session.execute(f"TRUNCATE {', '.join(name for (name,) in rows)} CASCADE")
        session.execute("CHECKPOINT")


def _delete(database: str) -> None:
    session = sqlite3.connect(database, isolation_level=None)
    rows = session.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' "
        "AND name NOT LIKE '%migration%' AND name NOT LIKE 'django_content%'"
    ).fetchall()
    for (name,) in rows:
        session.execute(f'DELETE FROM "{name}"')
    session.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    session.close()


PYTHON = sys.executable
PEERS = [
    Peer(
        name="pgqueuer, batches of 100",
        package="pgqueuer",
        module="pgqueuer_peer",
        worker=[PYTHON, "-m", "tests.benchmarks.peers.pgqueuer_peer"],
        jobs=20_000,
        variables={"MYXO_PEER_BATCH": "100"},
    ),
    Peer(
        name="pgqueuer, batches of 500",
        package="pgqueuer",
        module="pgqueuer_peer",
        worker=[PYTHON, "-m", "tests.benchmarks.peers.pgqueuer_peer"],
        jobs=20_000,
        variables={"MYXO_PEER_BATCH": "500"},
        is_variant=True,
    ),
    Peer(
        name="Graphile Worker",
        package="graphile-worker",
        module="graphile",
        worker=["node", str(HERE / "graphile.mjs"), "work", "{}"],
        jobs=40_000,
    ),
    Peer(
        name="procrastinate",
        package="procrastinate",
        module="procrastinate_peer",
        worker=[PYTHON, "-m", "tests.benchmarks.peers.procrastinate_peer"],
        jobs=1_500,
        is_django=True,
    ),
    Peer(
        name="dj-queue",
        package="dj_queue",
        module="django_peer",
        worker=[PYTHON, "-m", "django", "dj_queue"],
        jobs=1_500,
        is_django=True,
    ),
    Peer(
        name="django-ox",
        package="django_ox",
        module="django_peer",
        worker=[PYTHON, "-m", "django", "ox_worker", "--concurrency", "20", "--interval", "0.1"],
        jobs=1_500,
        databases=(POSTGRES, SQLITE),
        is_django=True,
    ),
    Peer(
        name="django-tasks-db",
        package="django_tasks_db",
        module="django_peer",
        worker=[PYTHON, "-m", "django", "db_worker", "--interval", "0.1", "--no-startup-delay"],
        jobs=1_000,
        is_django=True,
    ),
    Peer(
        name="huey",
        package="huey",
        module="huey_peer",
        worker=[
            PYTHON,
            "-m",
            "huey.bin.huey_consumer",
            "tests.benchmarks.peers.huey_peer.queue",
            "--workers=2",
            "--worker-type=thread",
            "--delay=0.01",
            "--max-delay=0.1",
        ],
        jobs=3_000,
        databases=(SQLITE,),
    ),
]
DJANGO_PEER_NAMES = tuple(peer.name for peer in PEERS if peer.is_django)


def install(bench: Bench) -> Bench:
    """Install the peers of this database; return the bench with those that are there."""
    there = []
    for peer in PEERS:
        if bench.database not in peer.databases:
            continue
        if not peer.is_installed:
            print(f"{peer.name} is not installed and left out", flush=True)
            continue
        try:
            if not peer.is_variant:
                peer.install()
        except Void as why:
            print(f"{peer.name} cannot be installed and is left out: {why}", flush=True)
            continue
        there.append(peer.name)
    return msgspec.structs.replace(bench, peers=there)


def contestants(bench: Bench, *, variants: bool = False) -> Sequence[Peer]:
    """Return the peers of a run, those of other batch sizes only if `variants`."""
    return [
        peer for peer in PEERS if peer.name in bench.peers and (variants or not peer.is_variant)
    ]


@contextmanager
def left_out_if_void(report: Report, peer: Peer) -> Iterator[None]:
    """Let a peer whose run means nothing be left out; the report says why."""
    try:
        yield
    except Void as why:
        report.notes.append(f"{peer.name} is left out: {why}")
