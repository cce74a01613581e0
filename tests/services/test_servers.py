"""A large download under real web servers, in memory that does not grow with the file.

MYXO_TEST_DOWNLOAD_MIB is how large: 128 unless it says otherwise, 1024 by hand.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from myxo_jobs.models import Job
from tests.docs.reader import free_port
from tests.rig import Process, process_environment, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

MIB = 1024 * 1024
SIZE = int(os.environ.get("MYXO_TEST_DOWNLOAD_MIB", "128")) * MIB
MOST_GROWTH = 50 * MIB
SERVERS = {
    "gunicorn": ["gunicorn", "tests.services.site:wsgi", "--bind=127.0.0.1:{port}", "--workers=1"],
    "uvicorn": ["uvicorn", "tests.services.site:asgi", "--port={port}", "--lifespan=off"],
}


@pytest.fixture
def serve(tmp_path: Path, settings: Any) -> Iterator[Callable[[str], Served]]:
    """Start a web server on the test's database: `serve("gunicorn")`."""
    started: list[Served] = []

    def start(name: str) -> Served:
        port = free_port()
        command = [sys.executable, "-m", *(word.format(port=port) for word in SERVERS[name])]
        environment = process_environment(
            settings={
                "ROOT_URLCONF": "tests.services.addresses",
                "MIDDLEWARE": ["django.middleware.gzip.GZipMiddleware", *settings.MIDDLEWARE],
                "STORAGES": {
                    **settings.STORAGES,
                    "myxo_jobs": {
                        "BACKEND": "django.core.files.storage.FileSystemStorage",
                        "OPTIONS": {"location": str(tmp_path / "private")},
                    },
                },
            }
        )
        started.append(Served(Process(command, tmp_path / f"{name}.log", environment), port))
        return started[-1]

    yield start
    for server in started:
        server.end()


class Served:
    """A web server, asked over real connections."""

    def __init__(self, process: Process, port: int) -> None:
        self._process = process
        self._port = port
        self._connections: list[http.client.HTTPConnection] = []

    def ask(self, address: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._connections.append(connection)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", address, headers={"Accept-Encoding": "gzip", **names})
        return connection.getresponse()

    def hang_up(self) -> None:
        """Close all connections, whatever is still to come."""
        for connection in self._connections:
            connection.close()

    def end(self) -> None:
        self.hang_up()
        self._process.end()

    def wait(self, address: str, **headers: str) -> None:
        def answers() -> bool:
            try:
                return self.ask(address, **headers).status == 200
            except OSError:
                assert self._process.exit_code is None, self._process.log()
                return False

        wait_until(answers, because="the server answers", within=60)

    def memory(self) -> int:
        """Return how much memory its processes have together."""
        process = psutil.Process(self._process.pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])


def write(path: Path, size: int) -> str:
    """Write a file of changing bytes; return its hash."""
    path.parent.mkdir(parents=True)
    digest, block = hashlib.sha256(), os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(size // MIB):
            piece = number.to_bytes(8) + block[8:]
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


@pytest.mark.parametrize("name", list(SERVERS))
def test_a_large_download_takes_no_memory_and_goes_on_where_it_broke_off(
    reader, serve, tmp_path, name
):
    job = reader.job()
    stored = f"myxo_jobs/export/{job.uid}/token/large.txt"
    digest = write(tmp_path / "private" / stored, SIZE)
    told = {"file": stored, "storage": "myxo_jobs", "file_bytes": SIZE}
    Job.objects.filter(pk=job.pk).update(result=json.dumps(told))
    cookie = f"sessionid={reader.client.cookies['sessionid'].value}"
    server = serve(name)
    server.wait(f"/jobs/{job.uid}/", Cookie=cookie)
    address, got = f"/jobs/{job.uid}/download/", hashlib.sha256()
    before = most = server.memory()

    def read(response: http.client.HTTPResponse, length: int) -> None:
        nonlocal most
        while length:
            piece = response.read(min(MIB, length))
            assert piece, "the answer ended early"
            got.update(piece)
            length -= len(piece)
            most = max(most, server.memory())

    first = server.ask(address, Cookie=cookie)
    assert first.getheader("Content-Length") == str(SIZE)
    assert first.getheader("Content-Encoding") == "identity"
    broken_off = SIZE * 2 // 5
    read(first, MIB)
    time.sleep(1)  # a server that reads ahead of its reader would do it now
    read(first, broken_off - MIB)
    first.close()
    server.hang_up()

    rest = server.ask(
        address,
        Cookie=cookie,
        Range=f"bytes={broken_off}-",
        If_Range=str(first.getheader("ETag")),
    )
    assert rest.status == 206
    assert rest.getheader("Content-Range") == f"bytes {broken_off}-{SIZE - 1}/{SIZE}"
    read(rest, SIZE - broken_off)
    assert rest.read() == b""

    assert got.hexdigest() == digest
    assert most - before < MOST_GROWTH, f"grew by {(most - before) / MIB:.0f} MiB"
    print(f"{name}: {SIZE / MIB:.0f} MiB, grew by {(most - before) / MIB:.1f} MiB")
