"""Real projects, each generated and started by itself: wherever handlers stand, it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rig import ROOT, Process, wait_until
from tests.settings import INSTALLED_APPS

SETTINGS = """
SECRET_KEY = "x"
INSTALLED_APPS = {apps!r}
DATABASES = {{"default": {database!r}}}
DEFAULT_AUTO_FIELD = {auto_field!r}
USE_TZ = True
ROOT_URLCONF = "urls"
{more}
"""
AUTH = ["django.contrib.contenttypes", "django.contrib.auth"]
HANDLER = """
import msgspec
from myxo_jobs import Jobs, job

jobs = Jobs()

class Ship(msgspec.Struct):
    order_id: int

@job(Ship)
def ship(request: Ship) -> None:
    from shop.models import Order
    Order.objects.filter(pk=request.order_id).update(shipped=True)
"""
MODELS = """
from django.db import models

class Order(models.Model):
    shipped = models.BooleanField(default=False)
"""


class Project:
    """A project in a folder, with a database of its own."""

    def __init__(self, folder: Path, database: dict[str, object]) -> None:
        self.folder = folder
        self.database = database
        self.write("urls.py", "urlpatterns = []\n")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def settings(
        self,
        apps: list[str],
        auto_field: str = "django.db.models.BigAutoField",
        more: str = "",
    ) -> None:
        self.write(
            "settings.py",
            SETTINGS.format(apps=apps, database=self.database, auto_field=auto_field, more=more),
        )

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}",
            "PYTHONUNBUFFERED": "1",
        }

    @contextmanager
    def start(self, *command: str) -> Iterator[Process]:
        """Run `python …` in the project until the block ends."""
        log = self.folder / "log"
        process = Process([sys.executable, *command], log, self.environment, self.folder)
        try:
            yield process
        finally:
            process.end()

    def run(self, *command: str, code: int = 0) -> str:
        """Run `python -W error …` in the project; return what it printed."""
        done = subprocess.run(
            [sys.executable, "-W", "error", *command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def django(self, *command: str, code: int = 0) -> str:
        return self.run("-m", "django", *command, code=code)


@pytest.fixture
def project(tmp_path: Path, empty_database: dict[str, object]) -> Project:
    return Project(tmp_path, empty_database)


def shop(project: Project, **files: str) -> None:
    """Write the app `shop`, with a migration, and these modules."""
    project.write("shop/__init__.py", "")
    project.write("shop/models.py", MODELS)
    for name, text in files.items():
        project.write(f"shop/{name}.py", text)


def in_jobs(project: Project) -> None:
    shop(project, jobs="from shop.models import Order\n" + HANDLER)


def imported_by_models(project: Project) -> None:
    shop(project, work=HANDLER, models="from shop.work import jobs, Ship\n" + MODELS)


def in_models(project: Project) -> None:
    shop(project, models=HANDLER + MODELS)


def imported_by_apps(project: Project) -> None:
    shop(
        project,
        work=HANDLER,
        apps=(
            "from django.apps import AppConfig\nfrom shop.work import jobs\n"
            "class Shop(AppConfig):\n    name = 'shop'\n"
        ),
    )


def in_the_package(project: Project) -> None:
    shop(project, __init__=HANDLER)


def in_a_circle_with_models(project: Project) -> None:
    shop(
        project,
        jobs="from shop.models import Order\n" + HANDLER,
        models=MODELS
        + "    def ship(self):\n        return jobs.put(Ship(self.pk))\n"
        + "\nfrom shop.jobs import jobs, Ship\n",
    )


def imported_by_ready(project: Project) -> None:
    shop(
        project,
        work=HANDLER,
        apps=(
            "from django.apps import AppConfig\n"
            "class Shop(AppConfig):\n    name = 'shop'\n"
            "    def ready(self):\n        import shop.work\n"
        ),
    )


PUT = """
import django
django.setup()
from shop.models import Order
from myxo_jobs import Jobs
from myxo_jobs.handlers import registry
request = registry.of_topic("shop.Ship").request
print("job", Jobs().put(request(Order.objects.create().pk)))
"""
# Start without a database, then do what a deploy does.
START = """
from django.db.backends.base.base import BaseDatabaseWrapper
connect = BaseDatabaseWrapper.connect
def refuse(connection):
    raise AssertionError("importing must not connect")
BaseDatabaseWrapper.connect = refuse
import django
django.setup()
BaseDatabaseWrapper.connect = connect
from django.core.management import call_command
call_command("check")
call_command("migrate", run_syncdb=True, verbosity=0)
"""


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "write",
    [
        in_jobs,
        in_models,
        imported_by_models,
        imported_by_apps,
        in_the_package,
        in_a_circle_with_models,
        imported_by_ready,
    ],
    ids=lambda write: write.__name__,
)
def test_a_project_starts_wherever_its_handlers_stand(
    project: Project, write: Callable[[Project], None], order: str
):
    write(project)
    project.settings(["shop", "myxo_jobs"] if order == "before" else ["myxo_jobs", "shop"])

    assert project.run("-c", START + PUT).endswith("job 1\n")


def test_the_site_and_a_worker_start_beside_a_circular_import(project: Project):
    in_a_circle_with_models(project)
    project.settings(["shop", "myxo_jobs"], more="DEBUG = True\n")
    project.run("-c", START + PUT)

    with project.start("-m", "django", "runserver", "--noreload", "127.0.0.1:0") as site:
        wait_until(lambda: "Quit the server with" in site.log(), because="it starts")
    assert "started" in project.django("runjobs", "--drain")
    shipped = "from shop.models import Order; print(Order.objects.get().shipped)"
    assert "True" in project.django("shell", "-c", shipped)


def test_two_handlers_of_one_topic_stop_the_start_naming_both_places(project: Project):
    in_jobs(project)
    project.write("shop/more.py", HANDLER)
    project.write("shop/jobs.py", HANDLER + "import shop.more\n")
    project.settings(["myxo_jobs", "shop"])

    said = project.django("check", code=1)
    assert "HandlerConflict: two handlers for topic 'shop.Ship'" in said
    assert "shop.jobs.ship" in said
    assert "shop.more.ship" in said


def test_a_broken_jobs_module_stops_the_start_with_its_traceback(project: Project):
    shop(project, jobs="import msgspec\nraise RuntimeError('broken module')\n")
    project.settings(["myxo_jobs", "shop"])

    said = project.django("check", code=1)
    assert "shop/jobs.py" in said
    assert "RuntimeError: broken module" in said


@pytest.mark.parametrize("auto_field", ["SmallAutoField", "AutoField", "BigAutoField"])
def test_ids_are_64_bit_and_migrations_are_complete_whatever_the_project_s_default(
    project: Project, auto_field: str
):
    project.settings(["myxo_jobs"], auto_field=f"django.db.models.{auto_field}")

    assert "No changes detected" in project.django("makemigrations", "--check", "--dry-run")
    project.django("migrate", "--verbosity", "0")
    project.run(
        "-c",
        "import django; django.setup()\n"
        "from myxo_jobs.models import Job\n"
        "job = Job.objects.create(id=2**62, topic='t', payload='{}')\n"
        "assert Job.objects.get().pk == 2**62\n",
    )


def test_migrating_to_zero_and_back_works(project: Project):
    in_jobs(project)
    project.settings([*AUTH, "shop", "myxo_jobs"])
    for target in ((), ("myxo_jobs", "zero"), (), ("myxo_jobs", "zero")):
        project.django(
            "migrate", *target, "--verbosity", "0", *([] if target else ["--run-syncdb"])
        )
    project.django("migrate", "--run-syncdb", "--verbosity", "0")

    assert project.run("-c", PUT) == "job 1\n"


def test_a_custom_user_model_needs_no_migration_of_ours(project: Project):
    shop(
        project,
        models=(
            "from django.contrib.auth.models import AbstractUser\n"
            "class User(AbstractUser):\n    pass\n"
        ),
    )
    project.settings(
        [*INSTALLED_APPS[:-1], "shop"],
        more="from tests.settings import MIDDLEWARE, TEMPLATES\nAUTH_USER_MODEL = 'shop.User'\n",
    )

    project.django("makemigrations", "shop")
    assert "No changes detected" in project.django("makemigrations", "--check", "--dry-run")
    project.django("migrate", "--verbosity", "0")


def test_the_queue_works_without_admin_and_auth(project: Project):
    in_jobs(project)
    project.settings(["myxo_jobs", "shop"])
    project.run(
        "-c",
        "import sys, django; django.setup()\n"
        "assert not any(name.startswith(('rangefilter', 'django.contrib.admin'))"
        " for name in sys.modules)\n",
    )


MIGRATION = """
from django.db import migrations

def put(apps, schema_editor):
    job = apps.get_model("myxo_jobs", "Job")
    job.objects.create(topic="shop.Ship", payload='{"order_id": 7}', key="first")

class Migration(migrations.Migration):
    dependencies = [("myxo_jobs", "0001_initial")]
    operations = [migrations.RunPython(put)]
"""
ROLLBACK_TESTS = """
from django.test import TransactionTestCase
from myxo_jobs import Jobs
from myxo_jobs.models import Job

class Rows(TransactionTestCase):
    serialized_rollback = True

    def check(self):
        job = Job.objects.get()
        self.assertEqual((job.topic, job.payload), ("shop.Ship", '{"order_id": 7}'))
        self.assertEqual((job.key, job.status), ("first", "pending"))
        Jobs().discard(job.pk)

    test_first = test_second = test_third = check
"""


def test_a_job_that_a_migration_put_is_there_in_every_test_with_serialized_rollback(
    project: Project,
):
    shop(project, models="", tests=ROLLBACK_TESTS)
    project.write("shop/migrations/__init__.py", "")
    project.write("shop/migrations/0001_initial.py", MIGRATION)
    project.settings(["myxo_jobs", "shop"])

    assert "Ran 3 tests" in project.django("test", "--noinput")
