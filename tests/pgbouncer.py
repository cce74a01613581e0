"""A real pgbouncer in transaction mode, in front of a PostgreSQL server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

PORT = 6432  # a part of the socket's name: it listens on no address
START_SECONDS = 10.0
STOP_SECONDS = 2.0
ADMIN = "admin"  # who may give orders at its console


def find() -> str | None:
    """Return where pgbouncer is installed, None where it is not."""
    # Debian has it beside what only root calls, which others need not have in their path.
    return shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")


def command(url: str, words: str) -> list[dict[str, Any]]:
    """Say something at a pgbouncer's console, such as `RECONNECT`; return the answer's rows."""
    with psycopg.connect(url, dbname="pgbouncer", user=ADMIN, autocommit=True) as console:
        # Its console takes statements by the simple protocol alone.
        cursor = psycopg.ClientCursor(console, row_factory=dict_row)
        cursor.execute(words.encode())
        return cursor.fetchall() if cursor.description else []


def let_go_of(url: str, database: str) -> None:
    """Close a pgbouncer's connections to a database, so that this can be dropped."""
    if database in [row["name"] for row in command(url, "SHOW DATABASES")]:
        command(url, f"KILL {database}")
        command(url, f"RESUME {database}")


@contextmanager
def pgbouncer(server: str, **settings: Any) -> Iterator[str]:
    """Start one in front of a server and give its URL; stop and remove it at the end."""
    one = Pgbouncer(server, **settings)
    try:
        one.start()
        yield one.url
    finally:
        one.remove()


class Pgbouncer:
    """One that the tests start, stop and kill; its clients come by a socket in its folder.

    As root it runs as whoever owns the server's socket.
    `settings` replace those of a pool of three connections for each database.
    """

    port = PORT

    def __init__(self, server: str, **settings: Any) -> None:
        program = find()
        if program is None:
            raise RuntimeError("pgbouncer is not installed: apt-get install pgbouncer")
        self._program = program
        self._server = conninfo_to_dict(server)
        # Short, since the path of a socket may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="myxo-bouncer-"))
        self.folder.chmod(0o755)
        self._user = self._choose_user()
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None
        self.configure(**settings)

    @property
    def url(self) -> str:
        """Where its clients find it."""
        name = self._server.get("dbname", "postgres")
        return f"postgresql://{self._name}@/{name}?host={self.folder}&port={PORT}"

    @property
    def version(self) -> tuple[int, ...]:
        said = subprocess.check_output([self._program, "--version"], text=True)
        found = re.search(r"PgBouncer ([\d.]+)", said)
        assert found, said
        return tuple(int(part) for part in found[1].split("."))

    @property
    def can_prepare(self) -> bool:
        """Whether it can follow prepared statements."""
        return self.version >= (1, 21)

    @property
    def _name(self) -> str:
        return str(self._server.get("user", "postgres"))

    def _choose_user(self) -> str | None:
        """Return who it runs as: it refuses to be root, and must reach the server's socket."""
        if os.geteuid() != 0:
            return None
        host = str(self._server.get("host", ""))
        return Path(host).owner() if host.startswith("/") else "nobody"

    def configure(self, **settings: Any) -> None:
        """Write its file of settings, for its next start."""
        usual = {
            "pool_mode": "transaction",
            "default_pool_size": 3,
            "max_client_conn": 500,
            "auth_type": "any",  # the socket is the door
            "admin_users": ADMIN,
            "listen_addr": "",
            "listen_port": PORT,
            "unix_socket_dir": self.folder,
            "pidfile": self.folder / "pid",
            "log_connections": 0,
            "log_disconnections": 0,
        }
        if self.can_prepare:
            usual["max_prepared_statements"] = 0
        names = ("host", "port", "user", "password")
        server = " ".join(f"{name}={self._server[name]}" for name in names if name in self._server)
        lines = [f"{name} = {value}" for name, value in (usual | settings).items()]
        text = "\n".join(["[databases]", f"* = {server}", "[pgbouncer]", *lines, ""])
        self._file = self.folder / "pgbouncer.ini"
        self._file.write_text(text)

    def start(self) -> None:
        """Start it, and wait until it takes clients."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                user=self._user,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.command("SHOW VERSION")
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"pgbouncer did not start:\n{self.log()}") from None
                time.sleep(0.02)
            else:
                return

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal; from 1.23 on it waits for its clients after SIGTERM, in vain."""
        assert self._process is not None
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def command(self, words: str) -> list[dict[str, Any]]:
        """Say something at its console; see `command`."""
        return command(self.url, words)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def remove(self) -> None:
        """Stop it if it runs, and remove its files."""
        if self._process is not None and self._process.poll() is None:
            self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder)
