"""A database of the demo's own, beside the site's, so that nothing of the site is touched.

It stays after the run, for a look at it, and the next run makes it afresh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection

from example_project.database_url import database
from example_project.notes.management.commands.demo_user import make_demo_user

FILE = "demo.sqlite3"
SUFFIX = "_demo"
MARK = "made by manage.py demo, which deletes it and makes it afresh"


def url_beside(site: str) -> str:
    """Return the address of the demo's database for the address of the site's.

    Raises CommandError when they are the same.
    """
    parts = urlsplit(site)
    name = unquote(parts.path.removeprefix("/"))
    is_file = parts.scheme == "sqlite"
    own = str(Path(name).with_name(FILE)) if is_file else name.removesuffix(SUFFIX) + SUFFIX
    if own == name:
        raise CommandError(f"DATABASE_URL names the demo's own database {name}: name the site's")
    path = quote("/" + own)
    # urllib would leave out the slashes of a host that is empty.
    return f"sqlite://{path}" if is_file else parts._replace(path=path).geturl()


@contextmanager
def own_database(url: str) -> Iterator[None]:
    """Make the demo's database, and work with it instead of the site's in this block."""
    site = connection.settings_dict["NAME"]
    own = database(url, settings.BASE_DIR)["NAME"]
    if isinstance(own, Path):
        _delete_files(own)
    else:
        _make_afresh(own)
    _use(own)
    try:
        call_command("migrate", verbosity=0)
        make_demo_user()
        yield
    finally:
        _use(site)


def _use(name: str | Path) -> None:
    connection.close()
    connection.settings_dict["NAME"] = name


def _delete_files(file: Path) -> None:
    for end in ("", "-wal", "-shm"):
        file.with_name(file.name + end).unlink(missing_ok=True)


def _make_afresh(name: str) -> None:
    """Make a PostgreSQL database, in the place of that of an earlier run."""
    quoted = connection.ops.quote_name(name)
    try:
        with connection.cursor() as cursor:
            if _is_there(name):
                cursor.execute(f"DROP DATABASE {quoted} WITH (FORCE)")
            cursor.execute(f"CREATE DATABASE {quoted}")
            cursor.execute(f"COMMENT ON DATABASE {quoted} IS '{MARK}'")
    except DatabaseError as error:
        raise CommandError(f"the demo cannot make its database {name}: {error}") from error


def _is_there(name: str) -> bool:
    """Tell whether the database of an earlier run is there.

    Raises CommandError when one of that name is there which no run made.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = %s",
            [name],
        )
        row = cursor.fetchone()
    if row and row[0] != MARK:
        raise CommandError(f"there is a database {name} that the demo did not make: it stays")
    return row is not None
