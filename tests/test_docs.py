"""The docs say what is there: their blocks run, and their reference is complete."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import django
import msgspec
import pytest
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import ConnectionHandler

import myxo_jobs
from myxo_jobs import CALLER, Jobs, Run, checks, errors, job, queue, services, testing
from myxo_jobs.conf import DIALS, Settings
from myxo_jobs.databases.postgres import NOTICE_A_DEAD_NETWORK
from myxo_jobs.management.commands.runjobs import Command
from myxo_jobs.models import Job, ServiceSettings
from myxo_jobs.services import urls
from myxo_jobs.services.rows import ServiceJob
from myxo_jobs.templatetags import myxo_jobs as job_tags
from tests.docs.pages import (
    DOCS,
    PAGES,
    README,
    Block,
    blocks,
    blocks_of,
    code_in,
    first_cells,
    section,
)
from tests.docs.reader import Reader
from tests.rig import ROOT, wait_until

runjobs = Command()

# -- what a reader does -------------------------------------------------------

# Blocks that need a package index or a machine of their own: where each is held instead.
RUN_ELSEWHERE = {
    "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python manage.py demo": (
        "test_the_demo_of_the_readme_ends_with_nothing_lost"
    ),
    ".venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest": ".ci/run",
    "pip install '/path/to/myxo_jobs[postgres]'": "tests/test_wheel.py",
    "python3 -m venv .venv\n. .venv/bin/activate\npip install /path/to/myxo_jobs": (
        "tests/test_wheel.py"
    ),
}
LANGUAGES_ELSEWHERE = {
    "sql": "test_every_sql_statement_runs_on_a_real_table",
    "ini": "test_every_runjobs_in_the_docs_has_options_that_there_are",
    "dockerfile": "test_every_runjobs_in_the_docs_has_options_that_there_are",
    "nginx": "test_nginx_sends_from_the_place_that_the_service_names",
    "js": "tests/browser/test_script.py",
}
# Their settings are of databases that are not the one under test.
POSTGRESQL_PAGE = DOCS / "how-to/use-postgresql.md"
OTHER_HOST_PAGE = DOCS / "how-to/use-a-database-on-another-host.md"
SQLITE_PAGE = DOCS / "how-to/use-sqlite.md"
# Their commands take minutes.
LONG_RUNS = (DOCS / "explanation/proof.md", DOCS / "explanation/performance.md")


def place_elsewhere(block: Block) -> str | None:
    """Return where else a block is held, None when the reader of its page runs it."""
    if block.language in LANGUAGES_ELSEWHERE:
        return LANGUAGES_ELSEWHERE[block.language]
    if not block.language and block.page.parent.name == "explanation":
        return "test_the_drawings_show_the_steps_that_there_are"
    if block.page == POSTGRESQL_PAGE and block.file:
        return "test_the_databases_that_the_postgresql_page_shows_are_ones_that_django_takes"
    if block.page == OTHER_HOST_PAGE and block.file:
        return (
            "test_the_page_on_another_host_asks_of_every_connection_what_the_worker_asks_of_its_own"
        )
    if block.page == SQLITE_PAGE and block.file:
        return "test_the_database_that_the_sqlite_page_shows_is_as_the_checks_advise"
    if block.page.name == "contributing.md":
        return ".ci/run"
    if block.page in LONG_RUNS:
        return "test_the_long_runs_in_the_docs_have_options_that_there_are"
    return RUN_ELSEWHERE.get(block.text.strip())


@pytest.fixture
def reader(tmp_path: Path, empty_database: dict[str, Any]) -> Iterator[Reader]:
    """Somebody with an empty folder; on SQLite the project's own settings choose the file."""
    reader = Reader(tmp_path, None if settings.DATABASE == "sqlite" else empty_database)
    yield reader
    reader.close()


def read(
    reader: Reader, page: Path, by_hand: Mapping[str, Callable[[Reader], None]] | None = None
) -> None:
    """Do each block of a page that is not run elsewhere."""
    for block in blocks_of(page):
        if place_elsewhere(block) is None:
            reader.do(block, by_hand or {})


def retry_in_the_admin(reader: Reader) -> None:
    site = f"http://127.0.0.1:{reader.port}"
    browser = build_opener(HTTPCookieProcessor(CookieJar()))

    def post(page: str, address: str, **fields: str) -> str:
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        assert token, page
        form = urlencode({"csrfmiddlewaretoken": token[1], **fields})
        return browser.open(site + address, form.encode()).read().decode()

    def open_list() -> str:
        try:
            return browser.open(f"{site}/admin/myxo_jobs/job/?status=failed").read().decode()
        except OSError:
            return ""

    login = wait_until(open_list, because="runserver answers", within=30)
    address = "/admin/login/?next=/admin/myxo_jobs/job/%3Fstatus%3Dfailed"
    jobs = post(login, address, username="ada", password="choose-a-better-one")
    assert "ZeroDivisionError: division by zero" in jobs
    assert "Retry selected jobs" in jobs
    ids = re.findall(r'name="_selected_action" value="(\d+)"', jobs)
    assert len(ids) == 1
    after = post(
        jobs,
        "/admin/myxo_jobs/job/?status=failed",
        action="retry",
        _selected_action=ids[0],
        index="0",
    )
    assert "Retried 1 job." in after
    reader.run(  # the reader is slower than the worker
        'python -c "import django, time; django.setup(); from notes.jobs import jobs; '
        f'[time.sleep(0.1) for _ in range(100) if jobs.get({ids[0]})]"'
    )


def test_the_tutorial_works_as_printed(reader: Reader):
    read(
        reader,
        DOCS / "tutorial.md",
        {
            "retry in the admin": retry_in_the_admin,
            "press Ctrl-C": lambda reader: reader.press_ctrl_c("runjobs"),
        },
    )


NOTES = """
from django.db import models

class Note(models.Model):
    text = models.TextField()
    words = models.IntegerField(null=True)
"""
OTHER_DATABASE = """
DATABASES["other"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
"""
GIVEN = """
from django.db import transaction
from notes.jobs import *
from notes.models import Note
note = Note.objects.create(text="three short words")

def create_order(using):
    transaction.get_connection(using).cursor().execute("create table an_order (id integer)")
    return note.pk
"""
SAVE_ONE_AND_ROLL_ONE_BACK = """
>>> import time
>>> from django.db import transaction
>>> from notes.jobs import Note, jobs, save_and_count
>>> note = Note(text="three short words")
>>> save_and_count(note)
>>> with transaction.atomic():
...     save_and_count(Note(text="never saved"))
...     transaction.set_rollback(True)
>>> deadline = time.monotonic() + 20
>>> while note.words is None and time.monotonic() < deadline:
...     time.sleep(0.02)
...     note.refresh_from_db()
>>> note.words, Note.objects.count()
(3, 1)
>>> from myxo_jobs.models import Job
>>> while Job.objects.exists() and time.monotonic() < deadline:
...     time.sleep(0.02)
>>> Job.objects.count()
0
"""


@pytest.fixture(scope="module")
def project_with_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that somebody has already, with the app `notes` that the README speaks of."""
    with closing(Reader(tmp_path_factory.mktemp("project"), None)) as reader:
        reader.run("django-admin startproject mysite .")
        reader.write("notes/__init__.py", "")
        reader.write("notes/migrations/__init__.py", "")
        reader.write("notes/models.py", NOTES)
        reader.write("given.py", 'from mysite.settings import *\nINSTALLED_APPS += ["notes"]\n')
        reader.run("python manage.py makemigrations notes --settings given")
    return reader.folder


@pytest.fixture
def reader_with_notes(reader: Reader, project_with_notes: Path) -> Reader:
    """A reader who has a copy of that project."""
    shutil.copytree(
        project_with_notes,
        reader.folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return reader


def test_the_twenty_lines_of_the_readme_work_as_printed(reader_with_notes: Reader):
    read(reader_with_notes, README)
    reader_with_notes.type(SAVE_ONE_AND_ROLL_ONE_BACK, "after the README")
    reader_with_notes.press_ctrl_c("runjobs")


FIRST_SERVICE = DOCS / "first-service.md"
# They share a project, in this order: to make one takes longer than to read them.
SERVICE_PAGES = [
    DOCS / f"how-to/{name}.md"
    for name in (
        "report-progress",
        "tell-the-person",
        "limit-and-time-out-a-service",
        "change-retention",
        "clean-up-after-a-service",
        "offer-a-download",
        "show-progress-on-a-page",
        "use-your-own-api",
    )
]
READ_ELSEWHERE = (README, DOCS / "tutorial.md", FIRST_SERVICE, *SERVICE_PAGES)
OTHER_PAGES = [page for page in PAGES if page not in READ_ELSEWHERE]


@pytest.mark.parametrize(
    "page",
    [page for page in OTHER_PAGES if any(not place_elsewhere(b) for b in blocks_of(page))],
    ids=lambda page: page.stem,
)
def test_each_block_of_a_page_runs_in_the_project_of_the_readme(
    reader_with_notes: Reader, page: Path
):
    read_in_the_project_of_the_readme(reader_with_notes, page)


CONSOLE = "django.core.mail.backends.console.EmailBackend"
MAIL_TO_THE_CONSOLE = (
    f'MAILERS = {{"default": {{"BACKEND": "{CONSOLE}"}}}}\n'
    if django.VERSION >= (6, 1)
    else f'EMAIL_BACKEND = "{CONSOLE}"\n'
)


def test_each_block_of_the_pages_on_services_runs_in_the_project_of_the_readme(
    reader_with_notes: Reader,
):
    reader_with_notes.write("mysite/settings.py", MAIL_TO_THE_CONSOLE)
    read_in_the_project_of_the_readme(reader_with_notes, *SERVICE_PAGES)


def read_in_the_project_of_the_readme(reader: Reader, *pages: Path) -> None:
    for block in blocks_of(README):
        if block.file:
            reader.write(block.file, block.text)
    reader.write("mysite/settings.py", OTHER_DATABASE)
    reader.run("python manage.py migrate")
    reader.given = GIVEN
    for page in pages:
        read(reader, page)


def test_the_page_on_tests_works_after_the_tutorial(reader: Reader):
    reader.run("django-admin startproject mysite .")
    reader.run("python manage.py startapp notes")
    for block in blocks_of(DOCS / "tutorial.md"):
        if block.file:
            reader.write(block.file, block.text)
    reader.run("python manage.py makemigrations notes")
    reader.run("python manage.py migrate")
    reader.given = GIVEN
    for block in blocks_of(DOCS / "how-to/test-code-that-puts-jobs.md"):
        if block.file == "notes/test_worker.py":
            return  # on SQLite it needs a file for the test database, as the page says
        reader.do(block, {})
    raise AssertionError("the page has no test with a worker")


def test_the_first_service_works_as_printed_after_the_tutorial(reader: Reader):
    reader.run("django-admin startproject mysite .")
    reader.run("python manage.py startapp notes")
    for block in blocks_of(DOCS / "tutorial.md"):
        if block.file:
            reader.write(block.file, block.text)
    reader.run("python manage.py makemigrations notes")
    reader.run("python manage.py migrate")

    read(reader, FIRST_SERVICE)
    (declared,) = [b for b in blocks_of(FIRST_SERVICE) if b.file == "notes/jobs.py"]
    assert len(declared.text.splitlines()) <= 25, "a service of about twenty lines"


def test_each_place_where_a_block_runs_elsewhere_is_there():
    places = {place_elsewhere(block) for page in PAGES for block in blocks_of(page)} - {None}

    missing = {place for place in places if place not in globals() and not (ROOT / place).exists()}
    assert missing == set()


def test_every_block_that_runs_elsewhere_is_still_on_a_page():
    texts = {block.text.strip() for page in PAGES for block in blocks_of(page)}

    assert set(RUN_ELSEWHERE) - texts == set()


def test_the_demo_of_the_readme_ends_with_nothing_lost(tmp_path: Path):
    """The README's first command without its installing, on a small folder."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(100):
        (texts / f"{number}.txt").write_text(f"text number {number} " * 200)

    done = subprocess.run(
        [sys.executable, "manage.py", "demo", str(texts)],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "DATABASE_URL": f"sqlite:///{tmp_path}/db.sqlite3",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout
    assert re.search(r"^\s*lost +0\b", done.stdout, re.MULTILINE), done.stdout


# -- SQL, settings, commands --------------------------------------------------


@pytest.mark.parametrize("page", LONG_RUNS, ids=lambda page: page.name)
def test_the_long_runs_in_the_docs_have_options_that_there_are(page):
    commands = re.findall(
        r"python -m (tests\.[\w.]+)(.*)", "\n".join(b.text for b in blocks_of(page))
    )
    assert commands
    for module, words in commands:
        shown = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT
        )
        assert shown.returncode == 0, shown.stderr
        for option in re.findall(r"--[\w-]+", words.partition("#")[0]):
            assert option in shown.stdout


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("place", "statement"),
    [
        (block.place, statement)
        for block in blocks("sql")
        for statement in re.sub(r"--.*", "", block.text).split(";")
        if statement.strip()
    ],
)
def test_every_sql_statement_runs_on_a_real_table(
    place: str, statement: str, make_job: Callable[..., Any]
):
    """As it stands, by the driver itself, and it meets the row it speaks of."""
    make_job("notes.CountWords", status="failed", id=42)
    make_job("notes.CountWords")
    connection.ensure_connection()
    cursor = connection.connection.cursor()

    cursor.execute(statement)
    rows = cursor.fetchall() if cursor.description else [None] * cursor.rowcount

    assert rows, f"{place}: {statement}"
    cursor.close()


def databases_in(page: Path, **names: Any) -> Iterator[BaseDatabaseWrapper]:
    """Yield a connection of each alias in the settings that a page shows."""
    for block in blocks_of(page):
        if block.file == "mysite/settings.py":
            exec(block.text, names)
            connections = ConnectionHandler(names["DATABASES"])
            yield from (connections[alias] for alias in names["DATABASES"])


@pytest.mark.django_db
def test_the_database_that_the_sqlite_page_shows_is_as_the_checks_advise(tmp_path: Path):
    (shown,) = databases_in(SQLITE_PAGE, BASE_DIR=tmp_path)
    with closing(shown), shown.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == ("wal",)
        assert shown.transaction_mode == "IMMEDIATE"  # type: ignore[attr-defined]


def test_the_databases_that_the_postgresql_page_shows_are_ones_that_django_takes():
    shown = list(databases_in(POSTGRESQL_PAGE))
    assert [database.alias for database in shown] == ["default", "default", "direct", "default"]
    for database in shown:
        assert database.get_connection_params()["dbname"] == "mysite"
    assert shown[-1].pool.max_size == 20  # type: ignore[attr-defined]


def test_the_page_on_another_host_asks_of_every_connection_what_the_worker_asks_of_its_own():
    one, both = (database.get_connection_params() for database in databases_in(OTHER_HOST_PAGE))

    assert NOTICE_A_DEAD_NETWORK.items() <= one.items()
    assert both["host"].count(",") == 1
    assert both["target_session_attrs"] == "read-write"
    for name, value in re.findall(r"^(tcp_\w+) = (\d+)", OTHER_HOST_PAGE.read_text(), re.MULTILINE):
        ours = NOTICE_A_DEAD_NETWORK[name.replace("tcp_keepalives", "keepalives")]
        assert int(value) == ours or int(value) * 1000 == ours


def test_nginx_sends_from_the_place_that_the_service_names():
    page = (DOCS / "how-to/offer-a-download.md").read_text()
    (location,) = re.findall(r"^location (\S+) \{", page, re.MULTILINE)
    (folder,) = re.findall(r"alias \S+/(\w+)/;", page)

    assert f'respond = accel("{location}")' in page
    assert f'BASE_DIR / "{folder}"' in page
    assert "    internal;\n" in page


def test_every_runjobs_in_the_docs_has_options_that_there_are():
    found = []
    for page in PAGES:
        text = page.read_text().replace('", "', " ")
        for options in re.findall(r"manage\.py runjobs((?: --?[\w-]+(?: [\w.,]+)?)*)", text):
            runjobs.create_parser("manage.py", "runjobs").parse_args(shlex.split(options))
            found.append(options)

    assert " --grace 30" in found
    assert len(found) > 10


def test_the_docs_give_a_worker_longer_than_its_grace():
    page = (DOCS / "how-to/deploy-and-stop.md").read_text()
    grace = {int(seconds) for seconds in re.findall(r'--grace(?: |", ")(\d+)', page)}
    longer = re.findall(
        r"(?:TimeoutStopSec=|--time |stop_grace_period: |terminationGracePeriodSeconds: )(\d+)",
        page,
    )

    assert grace == {30}
    assert len(longer) == 4
    assert min(int(seconds) for seconds in longer) > max(grace) + 2


def test_the_drawings_show_the_steps_that_there_are():
    drawings = [block for block in blocks("") if block.page.parent.name == "explanation"]
    assert len(drawings) == 2
    for drawing in drawings:
        steps = ["put", "claim", "complete", "retry", "fail", "give_back"]
        assert [step for step in steps if not callable(getattr(queue, step))] == []
        text = drawing.text.replace("give back", "give_back")
        assert [step for step in steps if step not in text] == [], drawing.place


# -- the reference ------------------------------------------------------------

JOBS = DOCS / "reference/jobs.md"


def test_the_reference_names_each_public_name():
    assert set(myxo_jobs.__all__) - code_in(JOBS) == set()
    assert first_cells(JOBS, "myxo_jobs.testing") == ["run_jobs", "put_jobs", "Worker"]
    assert set(testing.__all__) == {"run_jobs", "put_jobs", "Worker"}


def defaults_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return the keyword arguments of a function and their defaults, as a page writes them."""
    return {
        name: "CALLER" if parameter.default is CALLER else repr(parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


@pytest.mark.parametrize(("heading", "function"), [("@job", job), ("put", Jobs.put)])
def test_the_reference_names_each_option_and_its_default(
    heading: str, function: Callable[..., Any]
):
    options = defaults_of(function)
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section(JOBS, heading), re.MULTILINE)

    assert dict(rows) == options
    signature = ", ".join(f"{name}={default}" for name, default in options.items())
    assert f"*, {signature})`" in JOBS.read_text()


@pytest.mark.parametrize(
    "function",
    [Jobs.put_many, testing.run_jobs, testing.Worker],
    ids=lambda function: function.__name__,
)
def test_the_reference_prints_signatures_as_they_are(function: Callable[..., Any]):
    parameters = inspect.signature(function).parameters.values()
    given = [
        f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
        if parameter.default is not parameter.empty
    ]

    assert f"{', '.join(given)})`" in JOBS.read_text()


def test_the_reference_names_each_member_of_run():
    members = {name for name in dir(Run) if not name.startswith("_")}
    named = {cell.removeprefix("run.").split("(")[0] for cell in first_cells(JOBS, "The handler")}

    assert members - named == set()


def test_the_reference_names_each_method_of_jobs():
    methods = {name for name in vars(Jobs) if not name.startswith("_")}
    named = {name.removeprefix("jobs.").split("(")[0] for name in code_in(JOBS)}
    named |= {name.removeprefix("await jobs.").split("(")[0] for name in code_in(JOBS)}

    assert methods - named == set()


def test_the_reference_names_each_column_and_no_other():
    columns = [field.column for field in Job._meta.concrete_fields]

    assert sorted(first_cells(DOCS / "reference/table.md", "Columns")) == sorted(columns)


def test_the_reference_names_each_index():
    named = first_cells(DOCS / "reference/table.md", "Indexes")
    options = Job._meta

    assert {*(i.name for i in options.indexes), *(c.name for c in options.constraints)} <= {*named}


def test_the_reference_names_each_option_of_runjobs_and_no_other():
    parser = runjobs.create_parser("manage.py", "runjobs")
    django_s_own = BaseCommand().create_parser("manage.py", "x")
    options = {flag for action in parser._actions for flag in action.option_strings}
    options -= {flag for action in django_s_own._actions for flag in action.option_strings}

    assert set(first_cells(DOCS / "reference/runjobs.md", "Options")) == options


def test_the_reference_names_each_log_line():
    page = (DOCS / "reference/runjobs.md").read_text()
    package = Path(myxo_jobs.__file__).parent
    lines = [line for path in sorted(package.rglob("*.py")) for line in log_lines(path)]
    assert len(lines) > 15

    assert [line for line in lines if f"`{line}`" not in page] == []


def log_lines(path: Path) -> Iterator[str]:
    """Yield what the calls of a logger, and of `tell`, in a module write, … for each value."""
    for node in ast.walk(ast.parse(path.read_text())):
        words = None
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "words":
            words = node.value
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if re.fullmatch(r"logger\.(debug|info|warning|error|exception)|(queue\.)?tell", name):
                words = next((a for a in node.args if isinstance(a, ast.Constant)), None)
        if isinstance(words, ast.Constant) and isinstance(words.value, str):
            yield re.sub(r"%[.\d]*[a-z]", "…", words.value)


SERVICES = DOCS / "reference/services.md"
# What the document of a job has, at its address.
DOCUMENT = [
    *("uid", "kind", "title", "status", "cancelling", "reason", "message", "attempt"),
    *("max_attempts", "ahead", "progress", "done", "total", "percent", "note", "created_at"),
    *("started_at", "updated_at", "completed_at", "expires_at", "result", "file", "name"),
    *("bytes", "download_url", "cancel_url", "hint"),
]


def test_the_reference_names_all_there_is_to_services():
    named = {re.split(r"[(.\[]", code.removeprefix("job."))[0] for code in code_in(SERVICES)}
    named |= code_in(SERVICES)
    of_services = {name for name in vars(services.JobService) if not name.startswith("_")}
    of_services -= {"storage_alias", "shown_title", "tells"}  # what is made of the others
    of_jobs = {name for name in vars(ServiceJob) if not name.startswith("_")}
    of_jobs &= {*vars(Run), *dir(Run), "file", "url", "attempt", "run"}
    columns = {field.name for field in ServiceSettings._meta.fields}
    arguments = set(inspect.signature(services.enqueue).parameters)
    structs = {*services.ZipFiles.__struct_fields__, *services.ZipEntry.__struct_fields__}
    stats = set(service_stats_names())

    missing = {
        *services.__all__,
        *of_services,
        *of_jobs,
        *columns,
        *arguments,
        *stats,
        *("reason", "message", "error", "traceback", "language", "time_zone", "last_accessed_at"),
        *("item_count", "bytes_in", "bytes_out", "file", "storage", "file_bytes"),
        *("timeout", "lost", "cancelled", "refused", "entries", "storages", "missing"),
    } - named
    assert missing == set()
    assert set(DOCUMENT) - code_in(SERVICES) == set()
    assert all(name in SERVICES.read_text() for name in structs)


def service_stats_names() -> list[str]:
    source = inspect.getsource(services.service_stats)
    return [
        "pending",
        "running",
        "done",
        "failed",
        *re.findall(r'^        "(\w+)": ', source, re.MULTILINE),
    ]


ADDRESSES = DOCS / "reference/addresses.md"


def test_the_reference_of_the_addresses_names_each_field_address_tag_and_event():
    text = ADDRESSES.read_text()
    fields = set(re.findall(r"[\w.]+", " ".join(first_cells(ADDRESSES, "The status document"))))
    fields = {field.removeprefix("progress.") for field in fields} | {"progress", "name", "bytes"}
    script = (ROOT / "myxo_jobs/static/myxo_jobs/services.js").read_text()

    assert fields == set(DOCUMENT) - {"hint"}
    for pattern in urls.urlpatterns:
        row = f"| `{pattern.pattern}` |".replace("<str:uid>", "<uid>").replace("| `` |", "| |")
        assert f"{row} `{pattern.name}` |" in text
    assert set(re.findall(r"job:\w+", script)) == set(first_cells(ADDRESSES, "Events"))
    tags = {re.findall(r"\w+", tag)[0] for tag in first_cells(ADDRESSES, "Tags")}
    assert tags == set(job_tags.register.tags)


@pytest.mark.parametrize(
    "function",
    [
        services.enqueue,
        services.get_job,
        services.touch_job,
        services.list_jobs,
        services.cancel_job,
        services.delete_job,
        services.service_stats,
    ],
    ids=lambda function: function.__name__,
)
def test_the_reference_prints_the_functions_of_services_as_they_are(function):
    signature = inspect.signature(function)
    shown = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        has_default = parameter.default is not parameter.empty
        default = repr(parameter.default).replace("'", '"')
        shown.append(f"{parameter.name}={default}" if has_default else parameter.name)

    assert f"`{function.__name__}({', '.join(shown)})`" in SERVICES.read_text()


def test_the_reference_tells_the_defaults_of_a_service():
    rows = dict(
        re.findall(r"^\| `(\w+)` \| `?([^|`(]*[^|`( ])", SERVICES.read_text(), re.MULTILINE)
    )

    for name in ("retention_seconds", "max_concurrent", "job_timeout_seconds", "attempts"):
        assert int(rows[name].replace(",", "")) == getattr(services.JobService, name), name
    for name in ("payload_type", "cancellable"):
        assert rows[name] == repr(getattr(services.JobService, name)), name
    row = next(line for line in SERVICES.read_text().splitlines() if "`lease`, `backoff`" in line)
    numbers = [services.JobService.lease, services.JobService.backoff, services.JobService.priority]
    assert ", ".join(map(str, numbers)) in row


def test_the_reference_names_each_setting_its_default_and_no_other():
    page = (DOCS / "reference/settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.,]+|`\"\"`)", page, re.MULTILINE)
    named = {
        name: "" if default == '`""`' else float(default.replace(",", "")) for name, default in rows
    }

    assert named == msgspec.to_builtins(Settings())
    assert re.findall(r"^\| `<kind>_(\w+)` \|", page, re.MULTILINE) == list(DIALS)


def test_the_reference_names_each_error_and_what_else_it_is():
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \|", (DOCS / "reference/errors.md").read_text(), re.MULTILINE
    )
    named = {name: set(re.findall(r"`(\w+)`", bases)) for name, bases in rows}
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.JobsError)
    }

    assert named.keys() == classes.keys()
    for name, bases in named.items():
        assert bases <= {base.__name__ for base in classes[name].__mro__}, name
    assert {"Retry", "Snooze", "GiveUp"} <= code_in(DOCS / "reference/errors.md")


def test_the_reference_names_each_check_and_no_other():
    source = Path(checks.__file__).read_text()
    ids = re.findall(r'id="(myxo_jobs\.[EW]\d+)"', source)

    assert sorted(first_cells(DOCS / "reference/checks.md", "System checks")) == sorted(ids)


# -- the whole ----------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            names = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert anchor in names, f"{page.name} links to {target}#{anchor}"


def test_the_index_leads_to_every_page():
    index = DOCS / "README.md"
    linked = {
        (DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+\.md)", index.read_text())
    }

    assert {page for page in PAGES if page != index} - linked == set()


def test_the_docs_tell_the_versions_that_the_package_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
    dependencies = (DOCS / "explanation/dependencies.md").read_text()
    named = {re.split(r"[\[><=]", entry)[0] for entry in project["dependencies"]}
    for extra, entries in project["optional-dependencies"].items():
        assert f"`{extra}`" in dependencies
        named |= {re.split(r"[\[><=]", entry)[0] for entry in entries}
    assert {name for name in named - {"myxo-jobs"} if f"**{name}**" not in dependencies} == set()
