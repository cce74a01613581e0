"""The system checks: each speaks when it should, says what to do, and else is silent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.core import checks as django_checks
from django.db.utils import ConnectionHandler

from myxo_jobs import checks, job
from myxo_jobs.handlers import registry
from tests.rig import ROOT, process_environment

SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "jobs.sqlite3"}
POSTGRES = {"ENGINE": "django.db.backends.postgresql", "NAME": "jobs"}


@pytest.fixture
def databases(monkeypatch) -> Callable[..., None]:
    """Configure other databases for this test; nothing connects unless a check does."""

    def configure(**given: dict[str, Any]) -> None:
        monkeypatch.setattr(checks, "connections", ConnectionHandler(given))

    return configure


def said(*, databases: list[str] | None = None) -> dict[str, Any]:
    """Run all checks as Django does; return what ours say, by id."""
    found = django_checks.run_checks(databases=databases)
    ours = [message for message in found if message.id.startswith("myxo_jobs.")]
    assert all(message.hint and message.msg for message in ours)
    assert len({message.id for message in ours}) == len(ours)
    return {message.id: message for message in ours}


def project(tmp_path: Path, code: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with settings that replace those of the tests."""
    environment = process_environment(settings=settings)
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    return subprocess.run(
        [sys.executable, "-c", f"import django; django.setup()\n{code}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )


CHECK = "from django.core.management import call_command; call_command('check')"
CHECK_DATABASE = CHECK.replace("'check'", "'check', databases=['default']")


def sqlite_file(
    folder: Path, init_command: str = "PRAGMA journal_mode=WAL"
) -> dict[str, dict[str, Any]]:
    options = {"transaction_mode": "IMMEDIATE", "init_command": init_command}
    return {"default": {**SQLITE, "NAME": str(folder / "jobs.sqlite3"), "OPTIONS": options}}


# -- all is well --------------------------------------------------------------


@pytest.mark.django_db(databases=["default", "other"])
def test_a_project_set_up_as_the_docs_say_hears_nothing():
    assert said(databases=["default", "other"]) == {}


def test_without_named_databases_no_check_connects(databases, tmp_path):
    databases(default={**SQLITE, "NAME": str(tmp_path / "no" / "such" / "folder")})

    assert set(said()) == {"myxo_jobs.W001"}


# -- the kind of database -----------------------------------------------------


def test_a_database_that_is_neither_postgresql_nor_sqlite_is_an_error(databases):
    databases(default={"ENGINE": "django.db.backends.dummy", "NAME": "jobs"})

    message = said()["myxo_jobs.E002"]

    assert message.is_serious()
    assert "PostgreSQL or SQLite" in message.msg


@pytest.mark.parametrize("mode", [None, "DEFERRED", "deferred"])
def test_sqlite_without_immediate_transactions_is_advised_and_told_why(databases, mode):
    databases(default={**SQLITE, "OPTIONS": {"transaction_mode": mode} if mode else {}})

    message = said()["myxo_jobs.W001"]

    assert "a block that reads before it writes can be refused at once" in message.msg
    assert "No job is lost" in message.msg
    assert '["OPTIONS"]["transaction_mode"] = "IMMEDIATE"' in message.hint


@pytest.mark.parametrize("mode", ["IMMEDIATE", "immediate", "EXCLUSIVE"])
def test_sqlite_with_immediate_transactions_is_not_advised(databases, mode):
    databases(default={**SQLITE, "OPTIONS": {"transaction_mode": mode}})

    assert said() == {}


@pytest.mark.parametrize(
    ("init_command", "is_said"),
    [("", True), ("PRAGMA journal_mode=TRUNCATE", True), ("PRAGMA journal_mode=WAL", False)],
)
def test_sqlite_without_wal_is_advised_and_told_why(tmp_path, init_command, is_said):
    done = project(tmp_path, CHECK_DATABASE, DATABASES=sqlite_file(tmp_path, init_command))

    assert done.returncode == 0, done.stderr
    assert ("(myxo_jobs.W002)" in done.stderr) is is_said
    assert ("readers and writers wait for each other" in done.stderr) is is_said
    assert ("PRAGMA journal_mode=WAL" in done.stderr) is is_said


def test_sqlite_without_wal_is_not_connected_to_without_being_named(tmp_path):
    done = project(tmp_path, CHECK, DATABASES=sqlite_file(tmp_path, ""))

    assert done.returncode == 0, done.stderr
    assert "myxo_jobs." not in done.stderr
    assert not (tmp_path / "jobs.sqlite3").exists()


def test_a_database_that_holds_no_jobs_is_not_looked_into(databases, tmp_path):
    path = str(tmp_path / "no" / "such" / "folder")
    databases(default=SQLITE, other={**SQLITE, "NAME": path})

    assert checks.check_journal_mode(databases=["other"]) == []
    assert checks.check_table(databases=["other"]) == []


def test_a_database_that_is_away_is_told_by_whoever_needs_it(tmp_path):
    done = project(tmp_path, CHECK_DATABASE, DATABASES=sqlite_file(tmp_path / "no" / "folder"))

    assert done.returncode == 0, done.stderr
    assert "myxo_jobs." not in done.stderr


@pytest.mark.parametrize("name", [":memory:", "file:jobs?mode=memory&cache=shared"])
def test_sqlite_in_memory_is_no_place_for_a_worker(databases, name):
    databases(
        default={**SQLITE, "NAME": name, "OPTIONS": {"transaction_mode": "IMMEDIATE", "uri": True}}
    )

    message = said()["myxo_jobs.W003"]

    assert "would never see a job" in message.msg
    assert '["NAME"]' in message.hint


def test_the_in_memory_database_of_a_test_run_is_no_reason_to_warn(databases):
    databases(default={**SQLITE, "NAME": "file:memorydb_default?mode=memory&cache=shared"})

    assert "myxo_jobs.W003" not in said()


# -- the table ----------------------------------------------------------------


def test_a_database_without_the_table_is_told_to_migrate(tmp_path):
    done = project(tmp_path, CHECK_DATABASE, DATABASES=sqlite_file(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "(myxo_jobs.W007) The table of the jobs does not exist" in done.stderr
    assert "HINT: Run `manage.py migrate --database default`." in done.stderr


def test_a_table_of_an_older_version_is_told_to_migrate(tmp_path):
    done = project(
        tmp_path,
        "from django.core.management import call_command\n"
        "from django.db.migrations.recorder import MigrationRecorder\n"
        "call_command('migrate', verbosity=0)\n"
        "MigrationRecorder.Migration.objects.filter(app='myxo_jobs').delete()\n"
        f"{CHECK_DATABASE}",
        DATABASES=sqlite_file(tmp_path),
    )

    assert done.returncode == 0, done.stderr
    assert "(myxo_jobs.W007) The table of the jobs is older than this version" in done.stderr


def test_a_first_migrate_is_not_stopped_by_the_table_it_will_make(tmp_path):
    done = project(
        tmp_path,
        "from django.core.management import call_command\n"
        "call_command('migrate', verbosity=0, skip_checks=False)\n"
        "call_command('check', databases=['default'], fail_level='WARNING')",
        DATABASES=sqlite_file(tmp_path),
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("myxo_jobs.W007") == 1


# -- a pool -------------------------------------------------------------------


@pytest.fixture
def three_topics(monkeypatch) -> None:
    """The registry has these handlers alone: 5 + 2 threads, and async slots."""
    for name in ("_by_topic", "_by_request"):
        monkeypatch.setattr(registry, name, {})

    class First(msgspec.Struct):
        pass

    class Second(msgspec.Struct):
        pass

    class Third(msgspec.Struct):
        pass

    job(First, topic="test.first", workers=5)(lambda request: None)
    job(Second, topic="test.second", workers=2)(lambda request: None)

    @job(Third, topic="test.third", workers=50)
    async def third(request: Third) -> None: ...


@pytest.mark.parametrize(
    ("pool", "size"),
    [(True, 4), ({}, None), ({"min_size": 2}, 2), ({"min_size": 1, "max_size": 7}, 7)],
)
def test_a_pool_smaller_than_the_threads_is_told_how_many_are_needed(
    databases, three_topics, pool, size
):
    databases(default={**POSTGRES, "OPTIONS": {"pool": pool}})

    messages = said()

    if size is None:  # an empty dict is no pool to Django
        assert messages == {}
        return
    assert f"has at most {size} connections" in messages["myxo_jobs.W004"].msg
    assert "needs 8" in messages["myxo_jobs.W004"].msg
    assert '{"max_size": 8}' in messages["myxo_jobs.W004"].hint


@pytest.mark.parametrize("pool", [False, None, {"max_size": 8}, {"min_size": 9}])
def test_a_pool_that_is_large_enough_or_none_is_no_reason_to_warn(databases, three_topics, pool):
    databases(default={**POSTGRES, "OPTIONS": {"pool": pool}})

    assert said() == {}


# -- settings, apps, routes ---------------------------------------------------


@pytest.mark.parametrize("given", [{"pol_seconds": 1}, {"poll_seconds": "soon"}, 7])
def test_an_unknown_or_ill_typed_setting_is_an_error_that_names_it(settings, given):
    settings.MYXO_JOBS = given

    message = said()["myxo_jobs.E001"]

    assert message.is_serious()
    assert "MYXO_JOBS" in message.msg
    if isinstance(given, dict):
        assert next(iter(given)) in message.msg


def test_a_known_setting_of_its_type_is_no_error(settings):
    settings.MYXO_JOBS = {"poll_seconds": 2}

    assert said() == {}


@pytest.fixture
def other_app(tmp_path) -> str:
    """An app with a `runjobs` of its own, as django-extensions is one."""
    commands = tmp_path / "otherjobs" / "management" / "commands"
    commands.mkdir(parents=True)
    (commands / "runjobs.py").write_text(
        "from django.core.management.base import BaseCommand\nclass Command(BaseCommand): pass\n"
    )
    (tmp_path / "otherjobs" / "__init__.py").touch()
    return "otherjobs"


def project_of(tmp_path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Check a project of these apps and no addresses."""
    (tmp_path / "no_urls.py").write_text("urlpatterns = []\n")
    apps = ["django.contrib.auth", "django.contrib.contenttypes", *names, "tests.app"]
    return project(tmp_path, CHECK, INSTALLED_APPS=apps, ROOT_URLCONF="no_urls")


def test_another_app_s_runjobs_before_ours_is_an_error(tmp_path, other_app):
    done = project_of(tmp_path, other_app, "myxo_jobs")

    assert done.returncode != 0
    assert "(myxo_jobs.E003) `manage.py runjobs` is the command of otherjobs" in done.stderr
    assert 'HINT: List "myxo_jobs" before "otherjobs" in INSTALLED_APPS.' in done.stderr


def test_another_app_s_runjobs_after_ours_is_no_error(tmp_path, other_app):
    done = project_of(tmp_path, "myxo_jobs", other_app)

    assert done.returncode == 0, done.stderr
    assert "myxo_jobs." not in done.stderr


ADMIN = [
    "django.contrib.admin",
    "django.contrib.messages",
    "django.contrib.sessions",
]


@pytest.mark.parametrize(
    ("given", "is_said"),
    [
        ([*ADMIN, "myxo_jobs"], True),
        ([*ADMIN, "rangefilter", "myxo_jobs"], False),
        (["myxo_jobs"], False),
    ],
)
def test_the_admin_without_rangefilter_is_warned(tmp_path, given, is_said):
    done = project_of(tmp_path, *given)

    assert done.returncode == 0, done.stderr
    assert ("(myxo_jobs.W005)" in done.stderr) is is_said
    assert ('HINT: Add "rangefilter" to INSTALLED_APPS.' in done.stderr) is is_said


class JobsElsewhere:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "myxo_jobs" else None


class NotesElsewhere:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "notes" else None


class BothElsewhere:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label in ("myxo_jobs", "notes") else None


@pytest.mark.parametrize("router", [JobsElsewhere, NotesElsewhere])
def test_a_queue_routed_elsewhere_than_the_project_s_writes_is_warned_once(settings, router):
    settings.DATABASE_ROUTERS = [router()]

    message = said()["myxo_jobs.W006"]

    assert "commits at once" in message.msg
    assert "transaction.on_commit(" in message.hint


@pytest.mark.parametrize("routers", [[], [BothElsewhere()]])
def test_a_queue_in_the_database_of_the_project_s_writes_is_not_warned(settings, routers):
    settings.DATABASE_ROUTERS = routers

    assert said() == {}
