"""Somebody who does what a page says, block by block, in a project of their own.

A block that begins with `# path/of/a_file.py` goes to the end of that file. Shell
blocks are run, a `text` block is what the last of them has printed, `…` standing for
anything; a server or a worker goes on in a terminal of its own. A `pycon` block is
typed into a Python session that stays open. Every other block must be named by the
test, with the place where it is held instead.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.docs.pages import Block
from tests.rig import ROOT, Process, wait_until

STAYS = re.compile(r"python manage\.py (runserver|runjobs(?!.*--drain))")


class Reader:
    """Works in `folder`; `database` is the project's, as its settings have it if None."""

    def __init__(self, folder: Path, database: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self.port = _free_port()
        self._database = database
        self._printed: Callable[[], str] = lambda: ""
        self._terminals: list[Process] = []
        self._session: subprocess.Popen[str] | None = None
        self._numbers = iter(range(1, 1_000))

    # -- a page --------------------------------------------------------------

    def do(self, block: Block, by_hand: Mapping[str, Callable[[Reader], None]]) -> None:
        """Do what a block says. Raises LookupError for one that says nothing to do."""
        if block.language == "by hand":
            by_hand[block.text](self)
        elif block.language == "python" and block.file:
            self.write(block.file, block.text)
        elif block.language == "sh":
            for command in block.text.splitlines():
                self.run(command)
        elif block.language == "text":
            self.expect(block.text, block.place)
        elif block.language == "pycon":
            self.type(block.text, block.place)
        else:
            raise LookupError(f"{block.place}: nobody knows what to do with this block")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        if path.name == "settings.py" and self._database is not None:
            # The database under test takes the place of the project's.
            settings = f"from {path.parent.name}.settings import *\nDATABASES = "
            (self.folder / "on_server.py").write_text(
                settings + repr({"default": dict(self._database)}) + "\n"
            )

    def run(self, command: str) -> None:
        if STAYS.match(command):
            self._stay(command)
            return
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        self._printed = lambda: done.stdout

    def expect(self, text: str, place: str) -> None:
        """Wait until the last command has printed these lines; `…` stands for anything."""
        parts = [re.escape(part) for part in text.strip().split("…")]
        pattern = re.compile(".*?".join(parts), re.DOTALL)
        wait_until(
            lambda: pattern.search(self._printed()),
            because=f"{place}: this was to be printed:\n{text}\nbut this was:\n{self._printed()}",
            within=30,
        )

    def type(self, text: str, place: str) -> None:
        """Type a block into the Python session and compare what it answers."""
        file = self.folder / f".session-{next(self._numbers)}"
        file.write_text(text)
        if self._session is None:
            self._session = subprocess.Popen(
                [sys.executable, "-m", "tests.docs.session"],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._session.stdin
        assert self._session.stdout
        self._session.stdin.write(f"{file}\n")
        self._session.stdin.flush()
        said = []
        while (line := self._session.stdout.readline()) not in ("ok\n", "failed\n", ""):
            said.append(line)
        assert line == "ok\n", f"{place}\n{''.join(said)}"

    # -- terminals -----------------------------------------------------------

    def press_ctrl_c(self, command: str) -> None:
        """Press Ctrl-C where a command still runs, and wait for its end."""
        terminal = next(one for one in self._terminals if command in one.command)
        self._printed = terminal.log
        terminal.send(signal.SIGINT)
        assert terminal.wait() == 0, terminal.log()

    def close(self) -> None:
        for terminal in self._terminals:
            terminal.end()
        if self._session is not None:
            self._session.kill()
            self._session.communicate()

    def _stay(self, command: str) -> None:
        if "runserver" in command:
            command += f" {self.port} --noreload"
        log = self.folder / f".terminal-{next(self._numbers)}"
        terminal = Terminal(command, self.folder, log, self._environment())
        self._terminals.append(terminal)
        self._printed = terminal.log

    def _environment(self) -> dict[str, str]:
        settings = {} if self._database is None else {"DJANGO_SETTINGS_MODULE": "on_server"}
        if self._database is None:
            names = [path.parent.name for path in self.folder.glob("*/settings.py")]
            settings = {"DJANGO_SETTINGS_MODULE": f"{name}.settings" for name in names}
        inherited = {
            name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"
        }
        return {
            **inherited,
            **settings,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "error",
        }


class Terminal(Process):
    """A process that goes on while the reader reads."""

    def __init__(
        self, command: str, folder: Path, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.command = command
        super().__init__(["env", "-C", str(folder), *shlex.split(command)], log, environment)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port
