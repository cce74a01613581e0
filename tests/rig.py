"""What the tests are written with; conftest.py makes fixtures of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from django.apps import apps
from django.conf import settings as django_settings
from django.db import connection, connections, transaction
from django.utils import timezone

from myxo_jobs import queue
from myxo_jobs.databases import Floors, OnSuspect
from myxo_jobs.handlers import Handler, registry
from myxo_jobs.models import Job
from myxo_jobs.payloads import Codec

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/srv/notes/jobs.py", line 14, in count\n'
    "    send(note)\n"
    "ConnectionRefusedError: [Errno 111] Connection refused\n"
)


def wait_until(condition: Callable[[], T], *, because: str, within: float = 10.0) -> T:
    """Wait until `condition()` is true and return what it returned.

    Fails, saying `because`, when it is not within so many seconds. The longer it waits the
    less it asks, every 30 ms in the end: each question takes time that those asked need.
    """
    began = time.monotonic()
    while True:
        result = condition()
        if result:
            return result
        waited = time.monotonic() - began
        if waited > within:
            raise AssertionError(f"not within {within:g} s: {because} (last: {result!r})")
        time.sleep(min(max(0.01, waited / 20), 0.03))


def ago(seconds: float) -> datetime:
    """Return the moment so many seconds ago, whole milliseconds; a negative one lies ahead."""
    moment = timezone.now() - timedelta(seconds=seconds)
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


# -- rows ---------------------------------------------------------------------

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "pending": lambda: {"created_at": ago(60), "due": ago(60)},
    # A second attempt in good health: claimed ten seconds ago, renewed since.
    "running": lambda: {
        "created_at": ago(90),
        "due": ago(60),
        "worker": "2f1c9a7be0d45368.7",
        "lease_until": ago(-25),
        "attempts": 2,
        "error": "ConnectionRefusedError: [Errno 111] Connection refused",
        "traceback": TRACEBACK,
        "started_at": ago(10),
    },
    # The same, but its worker died: nobody renewed it, and the lease is over.
    "expired": lambda: {**STATES["running"](), "started_at": ago(35), "lease_until": ago(5)},
    "failed": lambda: {
        "created_at": ago(3600),
        "due": ago(300),
        "attempts": 10,
        "failed": True,
        "error": "ConnectionRefusedError: [Errno 111] Connection refused",
        "traceback": TRACEBACK,
        "started_at": ago(300),
        "completed_at": ago(299),
        "updated_at": ago(299),
        "duration_ms": 1_000,
        "reason": "error",
        "message": "",
    },
    # A kept job that was done ten seconds ago, and has a week left.
    "done": lambda: {
        "created_at": ago(90),
        "due": None,
        "attempts": 1,
        "started_at": ago(12),
        "uid": queue.uuid7(),
        "completed_at": ago(10),
        "updated_at": ago(10),
        "duration_ms": 2_000,
        "result": '{"words":3}',
        "expires_at": ago(-604_790),
    },
}


def make_job(
    topic: str = "notes.Work", *, status: str = "pending", using: str = "default", **columns: Any
) -> Job:
    """Insert a complete, believable row and return it as the database has it.

    `status` is pending, running, expired (running, but its lease is over), failed or done;
    `columns` replace what that state brings. For states that are far off: near ones
    are reached through `Jobs` and `claim_one`.
    """
    defaults = {"topic": topic, "payload": '{"name":"made"}', **STATES[status]()}
    with transaction.atomic(using=using):  # a worker of the test may be quick to remove it
        job = Job.objects.using(using).create(**defaults | columns)
        job.refresh_from_db(using=using)
    return job


def ended(job_id: int | None) -> Job:
    """Wait until a job has ended, done or failed, and return its row."""
    return wait_until(
        lambda: Job.objects.filter(pk=job_id, status__in=["done", "failed"]).first(),
        because="it has ended, and stays",
    )


class Anything(msgspec.Struct):
    """The request of topics that have no handler."""


def handler_of(topic: str, **arguments: Any) -> Handler:
    """Return the handler of a topic, or make one that nobody registered.

    `arguments` replace what it declared, such as `lease=30`.
    """
    handler = registry.of_topic(topic) or Handler(
        function=lambda request, run: None,
        request=Anything,
        codec=Codec(Anything),
        topic=topic,
        workers=1,
        attempts=10,
        lease=30.0,
        backoff=1.0,
        timeout=None,
        atomic=False,
        priority=0,
        takes_run=True,
        is_async=False,
    )
    return msgspec.structs.replace(handler, **arguments)


_tokens = queue.Tokens()


def claim_some(
    topic: str = "notes.Work",
    limit: int = 100,
    *,
    lease: float = 30.0,
    on_suspect: OnSuspect = "take",
    floors: Floors | None = None,
) -> list[queue.Claim]:
    """Claim up to `limit` due jobs of a topic as a worker would, with one new token."""
    handler = handler_of(topic, lease=float(lease))
    return queue.claim(
        connection, handler, limit, token=_tokens.next(), on_suspect=on_suspect, floors=floors
    )


def claim_one(topic: str = "notes.Work", *, lease: float = 30.0) -> queue.Claim:
    """Claim the first due job of a topic; fail when there is none."""
    claims = claim_some(topic, 1, lease=lease)
    assert claims, f"no job of {topic} is due"
    return claims[0]


def wind_back(job: Job | queue.Claim | int, *, seconds: float) -> None:
    """Make a job's row so much older: tests move the row, not the clock."""
    job_id = job if isinstance(job, int) else job.pk if isinstance(job, Job) else job.job_id
    moments = ("created_at", "due", "started_at", "lease_until")
    row = Job.objects.filter(pk=job_id).values(*moments).get()
    older = {name: at and at - timedelta(seconds=seconds) for name, at in row.items()}
    assert Job.objects.filter(pk=job_id).update(**older) == 1


# -- threads ------------------------------------------------------------------


def in_threads(*actions: Callable[[], T], within: float = 30.0) -> list[T]:
    """Run actions at once, each in a thread with its own connection; return what they return.

    They start together at a barrier. Raises the first error that one of them raised.
    """
    barrier = threading.Barrier(len(actions))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(place: int, action: Callable[[], T]) -> None:
        try:
            barrier.wait()
            results[place] = action()
        except BaseException as error:  # handed to the test below
            errors.append(error)
        finally:
            connections.close_all()

    threads = [
        threading.Thread(target=run, args=(place, action), daemon=True)
        for place, action in enumerate(actions)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"a thread did not end within {within:g} s"
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(actions))]


# -- processes ----------------------------------------------------------------


def process_environment(
    *, settings: Mapping[str, Any] | None = None, **variables: str
) -> dict[str, str]:
    """Return the environment of a process that works on this test's database.

    `settings` replace those of tests/settings.py there. Unless they bring a database of
    their own, the process finds it as made here: by --nomigrations, without migrations.
    """
    names = {alias: str(connections[alias].settings_dict["NAME"]) for alias in connections}
    replaced = dict(settings or {})
    name = replaced.get("DATABASES", {}).get("default", {}).get("NAME", names["default"])
    if str(name) == names["default"]:
        labels = [app.label for app in apps.get_app_configs()]
        unmigrated = [label for label in labels if label in django_settings.MIGRATION_MODULES]
        replaced["MIGRATION_MODULES"] = dict.fromkeys(unmigrated)
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "MYXO_TEST_NAMES": json.dumps(names),
        "MYXO_TEST_SETTINGS": json.dumps(replaced),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **variables,
    }


class Process:
    """A process, such as `runjobs`: send it signals, wait for its end, read its log."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        folder: Path = ROOT,
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=folder, env=dict(environment), stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, minus N after signal N, or None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """Return what it has written to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, such as `signal.SIGTERM`."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def wait(self, *, within: float = 30.0) -> int:
        """Return the exit code; fail, showing the log, when it does not end in time."""
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"process {self.pid} did not end within {within:g} s:\n{self.log()}"
            ) from None

    def wait_for_log(self, text: str, *, within: float = 30.0) -> None:
        """Wait until its log contains a text; fail, showing the log, when it does not."""
        deadline = time.monotonic() + within
        while text not in self.log():
            if time.monotonic() > deadline or self.exit_code is not None:
                raise AssertionError(f"no {text!r} in the log:\n{self.log()}")
            time.sleep(0.02)

    def children(self) -> list[int]:
        """Return the numbers of its child processes, such as the workers of a supervisor."""
        try:
            listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in listed.split()]

    def end(self) -> None:
        """Kill it, and its children, if it still runs."""
        if self.exit_code is None:
            children = self.children()
            self.kill()
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class RunJobs:
    """Starts `runjobs` processes on the test's database; each is killed after the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Process] = []

    def __call__(
        self,
        *options: str,
        settings: Mapping[str, Any] | None = None,
        ready: bool = True,
        **variables: str,
    ) -> Process:
        """Start `python -m django runjobs *options`, with the handlers of tests/app.

        `settings` replace those of tests/settings.py, `variables` go into the
        environment. Returns once the worker says that it started, unless not `ready`.
        """
        log = self._folder / f"runjobs-{len(self._processes) + 1}.log"
        command = [sys.executable, "-m", "django", "runjobs", *options]
        environment = process_environment(settings=settings, **variables)
        process = Process(command, log, environment)
        self._processes.append(process)
        if ready:
            process.wait_for_log(" started using=")
        return process

    def end(self) -> None:
        for process in self._processes:
            process.end()
