"""What handlers raise, and do, that nobody should."""

from __future__ import annotations

import ctypes
import fcntl
import locale
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from django.db import connection, connections, transaction

from tests.ledger import VARIABLE

REFUSED = "the database refuses this error"


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def _raise(make: Callable[[], BaseException]) -> Callable[[], None]:
    def action() -> None:
        raise make()

    return action


def _cyclic() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    raise one


def _deep() -> None:
    _deep()


def _chained() -> None:
    error: Exception = ValueError("the first")
    for number in range(2_000):
        following = ValueError(f"number {number}")
        following.__cause__ = error
        error = following
    raise error


ANIMALS: dict[str, Callable[[], None]] = {
    "nul": _raise(lambda: ValueError("a \0 inside")),
    "surrogate": _raise(lambda: ValueError("half a pair \ud83d")),
    "invalid utf-8": _raise(lambda: ValueError(b"\xff\xfe".decode("utf-8", "surrogateescape"))),
    "10 MB": _raise(lambda: ValueError("x" * 10_000_000)),
    "mute": _raise(_MuteError),
    "cyclic cause": _cyclic,
    "bytes": _raise(lambda: ValueError(b"\xff\0\xfe")),
    "deep recursion": _deep,
    "long chain": _chained,
    "group": _raise(lambda: ExceptionGroup("many", [ValueError(str(n)) for n in range(1_000)])),
    "system exit": _raise(lambda: SystemExit(3)),
    "interrupt": _raise(KeyboardInterrupt),
    "generator exit": _raise(GeneratorExit),
    "base": _raise(lambda: BaseException("base")),
    "empty": _raise(ValueError),
    # Takes its room in the table, since nothing compresses it.
    "noise": _raise(lambda: ValueError(os.urandom(8_000).hex())),
    # Not for its text: a constraint that the scenario adds refuses the row.
    "refused": _raise(lambda: ValueError(REFUSED)),
}


# -- handlers that never end ---------------------------------------------------


def _spin() -> None:
    while True:
        pass


def _sleep() -> None:
    while True:
        time.sleep(0.01)


def _wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _keep_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(3600)  # C code that does not let other threads run


def _own_path(name: str) -> Path:
    return Path(os.environ[VARIABLE]).with_name(f"{name} {threading.get_ident()} {time.time_ns()}")


def _read_a_pipe() -> None:
    path = _own_path("pipe")
    os.mkfifo(path)
    path.open()  # waits in the kernel for a writer


def _wait_for_a_file() -> None:
    path = _own_path("file")
    with path.open("w") as holds, path.open("w") as waits:
        fcntl.flock(holds, fcntl.LOCK_EX)
        fcntl.flock(waits, fcntl.LOCK_EX)  # in the kernel


HANGS: dict[str, Callable[[], None]] = {
    "spins": _spin,
    "sleeps": _sleep,
    "waits for a lock": _wait_for_a_lock,
    "keeps the interpreter": _keep_the_interpreter,
    "reads a pipe": _read_a_pipe,
    "waits for a file": _wait_for_a_file,
}


# -- what is left in the process -----------------------------------------------


def _fork() -> None:
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)


def _change_signals() -> None:
    with suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _surroundings() -> list[object]:
    mask = os.umask(0)
    os.umask(mask)
    output = sys.stdout is not None and sys.stdout.closed
    return [Path.cwd(), oct(mask), locale.setlocale(locale.LC_ALL), output]


AT_FIRST = _surroundings()


def _look_around() -> None:
    """Raise unless the process is as it was at the start, and still hears of signals."""
    now = _surroundings()
    assert now == AT_FIRST, f"{now}, not {AT_FIRST}"
    assert callable(signal.getsignal(signal.SIGTERM))


LITTER: dict[str, Callable[[], object]] = {
    "nothing": _look_around,
    "a fork": _fork,
    "a fork that comes back": os.fork,
    "a child": lambda: subprocess.Popen(["sleep", "1"]),
    "a thread": lambda: threading.Thread(target=time.sleep, args=(1,), daemon=True).start(),
    "no stdout": lambda: sys.stdout.close(),
    "a folder": lambda: os.chdir("/"),
    "a mask": lambda: os.umask(0o777),
    "a signal handler": _change_signals,
    "a locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
}


# -- what is left in the connection ---------------------------------------------


def _execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def _abort() -> None:
    _execute("BEGIN")
    with suppress(Exception):
        _execute("SELECT nothing_of_this_name")


def _leave_a_block() -> None:
    transaction.atomic().__enter__()
    _execute("SELECT 1")


def _probe() -> None:
    """Raise unless the connection is as Django makes it."""
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    _execute("SELECT 1", "BEGIN", "SELECT count(*) FROM myxo_jobs WHERE id = 0", "ROLLBACK")
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT current_setting('search_path'), (SELECT count(*) FROM pg_cursors), "
                "count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            )
            assert cursor.fetchone() == ('"$user", public', 0, 0)


def _leave_a_cursor() -> None:
    if connection.vendor == "postgresql":
        _execute("DECLARE left_open CURSOR WITH HOLD FOR SELECT id FROM myxo_jobs")
    else:
        connection.cursor().execute("SELECT 1 UNION SELECT 2").fetchone()


def _connect_often() -> None:
    for _ in range(10):
        connections.create_connection("default").ensure_connection()


DIRT: dict[str, Callable[[], object]] = {
    "nothing": _probe,
    "a transaction": lambda: _execute("BEGIN", "SELECT 1 FROM myxo_jobs"),
    "an aborted transaction": _abort,
    "a block": _leave_a_block,
    "a cursor": _leave_a_cursor,
    "many connections": _connect_often,
    "no autocommit": lambda: connection.set_autocommit(False),
    "a search path": lambda: _execute("SET search_path TO pg_catalog"),
    "a session lock": lambda: _execute("SELECT pg_advisory_lock(7)"),
}
ONLY_POSTGRES = ("a search path", "a session lock")


# -- texts that would do something where nothing escapes them ---------------------

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
TEXTS = {
    "markup": MARKUP,
    "an attribute": "\" onmouseover=alert(1) x='",
    "an address": "javascript:alert(1)",
    "a terminal": "\x1b]0;owned\x07\x1b[2J\x9b31m",
    "a template": "{{ 7|add:'7' }}{% load static %}{% now 'Y' %}",
    "a format": "%s %(count)s {0.__class__}",
    "a formula": '=HYPERLINK("http://evil.example","x")',
    "a path": "../../../../etc/passwd",
    "a path elsewhere": "C:\\..\\..\\evil.exe",
    "a header": "a.csv\r\nSet-Cookie: owned=1\r\n\r\n<html>",
    "another direction": "\u202efdp.exe",
    "another line": "x\n2026-01-01 00:00:00,000 ERROR worker=owned stopped",
    "a nul": "a \0 inside",
    "a page": "data:text/html,<script>alert(1)</script>.html",
}


def code_that_touches(path: Path) -> dict[str, object]:
    """Return what some reader of some format would take for code to run."""
    command = f"touch {path}"
    return {
        "__class__": "os.system",
        "__reduce__": ["os.system", [command]],
        "py/object/apply:os.system": [command],
        "py/reduce": [{"py/function": "posix.system"}, {"py/tuple": [command]}],
        "!!python/object/apply:os.system": [command],
        "$type": "System.Diagnostics.Process",
        "__proto__": {"polluted": True},
        "yaml": f"!!python/object/apply:os.system ['{command}']",
        "pickle": f"cposix\nsystem\n(S'{command}'\ntR.",
        "shell": f"$({command})`{command}`; {command}",
        "handler": "tests.chaos.zoo.code_that_touches",
    }
