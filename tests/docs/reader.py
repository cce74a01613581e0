"""Somebody who does what a page says, block by block, in a project of their own.

A block that begins with `# path/of/a_file.py` goes to the end of that file, and so does a
template that begins with `{# path/of/it.html #}`. Shell
blocks are run, a `text` block is what the last of them has printed, `…` standing for
anything; a server or a worker goes on in a terminal of its own. Other Python blocks,
`pycon` ones with their answers, are typed into a session that stays open until a file
is written. Every other block must be named by the test, with the place where it is
held instead.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.docs.pages import Block
from tests.rig import ROOT, Process, wait_until

# The pages call their project `mysite`.
SETTINGS = "mysite.settings"
ON_SERVER = "on_server"
STAYS = re.compile(r"python manage\.py (runserver|runjobs(?!.*--drain))")


class Reader:
    """Works in `folder`; `database` is the project's, as its settings have it if None."""

    def __init__(self, folder: Path, database: Mapping[str, Any] | None) -> None:
        self.folder = folder
        # What a page takes as given: Python to begin each session with.
        self.given = ""
        self.port = free_port()
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
        elif block.language in ("python", "html") and block.file:
            self.write(block.file, block.text)
        elif block.language == "sh":
            for command in block.text.splitlines():
                self.run(command)
        elif block.language == "text":
            self.expect(block.text, block.place)
        elif block.language in ("python", "pycon"):
            self.type(block.text, block.place, block.language)
        else:
            raise LookupError(f"{block.place}: nobody knows what to do with this block")

    def write(self, name: str, text: str) -> None:
        self._end_session()
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        if path.name == "settings.py" and self._database is not None:
            # The database under test takes the place of the project's.
            (self.folder / f"{ON_SERVER}.py").write_text(
                f"from {SETTINGS} import *\n"
                f'DATABASES = {{**DATABASES, "default": {dict(self._database)!r}}}\n'
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
        try:
            wait_until(lambda: pattern.search(self._printed()), because=place, within=30)
        except AssertionError:
            printed = self._printed()
            raise AssertionError(f"{place}: expected\n{text}\nprinted\n{printed}") from None

    def type(self, text: str, place: str, language: str = "pycon") -> None:
        """Type a block into the Python session and compare what it answers."""
        if self._session is None:
            self._session = subprocess.Popen(
                [sys.executable, "-m", "tests.docs.session"],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            if self.given:
                self.type(self.given, "what is given", "python")
        file = self.folder / f".session-{next(self._numbers)}.{language}"
        file.write_text(text)
        assert self._session.stdin
        assert self._session.stdout
        patience = threading.Timer(60, self._session.kill)
        patience.start()
        self._session.stdin.write(f"{file}\n")
        self._session.stdin.flush()
        said = []
        while (line := self._session.stdout.readline()) not in ("ok\n", "failed\n", ""):
            said.append(line)
        patience.cancel()
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
        self._end_session()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.kill()
            self._session.communicate()
            self._session = None

    def _stay(self, command: str) -> None:
        if "runserver" in command:
            command += f" {self.port} --noreload"
        log = self.folder / f".terminal-{next(self._numbers)}"
        terminal = Terminal(command, self.folder, log, self._environment())
        self._terminals.append(terminal)
        self._printed = terminal.log
        terminal.wait_for_log("started using=" if "runjobs" in command else "Quit the server")

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": SETTINGS if self._database is None else ON_SERVER,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "error",
            "PYTEST_ADDOPTS": "-p no:asyncio",  # it warns where it happens to be installed
        }


class Terminal(Process):
    """A process that goes on while the reader reads."""

    def __init__(
        self, command: str, folder: Path, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.command = command
        there = f"cd {shlex.quote(str(folder))} && exec {command}"
        super().__init__(["bash", "-c", there], log, environment)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port
