"""The processes of a scenario: start them, begin together, take what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from tests.benchmarks.evidence import Void

ROOT = Path(__file__).parent.parent.parent


class Actor:
    """A process of `tests.benchmarks.actor`, or of another program that speaks like it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._name = " ".join(command[-2:])
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        answer = self._answer()
        if answer != "ready":
            raise Void(f"{self._name} said {answer!r}:\n{self._log()}")

    def say(self) -> None:
        """Tell it to begin or, if it runs until it is told, to end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("now\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Void(f"{self._name} ended early:\n{self._log()}") from None

    def result(self) -> Any:
        """Wait for its end and return what it measured."""
        answer = self._answer()
        self._process.wait()
        if not answer:
            raise Void(f"{self._name} ended with {self._process.returncode}:\n{self._log()}")
        return json.loads(answer)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _log(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]

    def end(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


def python_actor(function: str, environment: Mapping[str, str], **arguments: Any) -> Actor:
    """Start a process that calls a function of tests/benchmarks, once it is told to."""
    command = [sys.executable, "-m", "tests.benchmarks.actor", function, json.dumps(arguments)]
    return Actor(command, environment)


class Stage(ExitStack):
    """The actors of one measurement; none of them outlives it."""

    def enter(self, actor: Actor) -> Actor:
        self.callback(actor.end)
        return actor

    def perform(self, *actors: Actor) -> list[Any]:
        """Let actors begin together once all are ready; return what they measured."""
        self.begin(*actors)
        return [actor.result() for actor in actors]

    def begin(self, *actors: Actor) -> None:
        for actor in actors:
            self.enter(actor)
        for actor in actors:
            actor.wait_until_ready()
        for actor in actors:
            actor.say()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def ended(actor: Actor) -> Any:
    """Tell an actor that runs until it is told to end; return what it measured."""
    actor.say()
    return actor.result()


@contextmanager
def program(
    command: Sequence[str], *, until: str | None, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run a program; give its process number once its log says `until`, if that is given.

    It gets SIGTERM at the end, and SIGKILL when that does not end it.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 30
            while until is not None and until not in _text(log):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Void(f"{' '.join(command)} did not start:\n{_text(log)}")
                time.sleep(0.02)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _text(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
