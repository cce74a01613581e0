"""A web site beside the workers: a real server, and the people who ask it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tests.chaos.people import Person
from tests.chaos.rig import ROOT, Rig

SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "tests.chaos.site_settings",
    "MYXO_CHAOS_NAME": "chaos-site",
    "MYXO_CHAOS_SERVICES": "1",
}


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return ", ".join(value for one, value in self.headers if one.lower() == name.lower())

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """A web server of one process, until the run ends; ada and eve have jobs, root sees all."""

    def __init__(self, rig: Rig) -> None:
        from tests.docs.reader import free_port  # which needs the settings

        environment = os.environ | SETTINGS
        made = subprocess.run(
            [sys.executable, "-m", "tests.chaos.people"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        people = msgspec.json.decode(made.stdout.splitlines()[-1], type=dict[str, Person])
        self.ada, self.eve, self.root = (people[name] for name in ("ada", "eve", "root"))
        self._port = free_port()
        self._log = rig.folder / "site.log"
        command = ["gunicorn", "tests.services.site:wsgi", f"--bind=127.0.0.1:{self._port}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command, "--workers=1", "--timeout=120"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        rig.at_end.append(self._end)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError):
                self.ask(self.root, "/admin/myxo_jobs/job/")
                return
            time.sleep(0.1)
        raise RuntimeError(f"the site did not start:\n{self.log()[-2000:]}")

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def open(
        self, person: Person, address: str, method: str = "GET", accept: str = "application/json"
    ) -> http.client.HTTPResponse:
        """Ask for something; the answer is still to be read."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        headers = {"Accept": accept, "Cookie": f"sessionid={person.session}"}
        connection.request(method, address, headers=headers)
        return connection.getresponse()

    def ask(
        self, person: Person, address: str, method: str = "GET", accept: str = "application/json"
    ) -> Answer:
        answer = self.open(person, address, method, accept)
        return Answer(answer.status, answer.getheaders(), answer.read())

    def page(self, person: Person, address: str) -> Answer:
        return self.ask(person, address, accept="text/html")

    # -- its memory --------------------------------------------------------------

    def _worker(self) -> int:
        (worker,) = psutil.Process(self._process.pid).children()
        return worker.pid

    def forget_peak(self) -> None:
        """Let the most memory be what it uses now."""
        Path(f"/proc/{self._worker()}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Return the most memory it has used since it was told to forget."""
        status = Path(f"/proc/{self._worker()}/status").read_text()
        (kib,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(kib) / 1024
