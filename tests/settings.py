"""The settings of the suite, and of the `runjobs` processes it starts.

MYXO_TEST_DATABASE   sqlite, postgres or pgbouncer: the database under test
MYXO_TEST_POSTGRES   the server (a URL or DSN); the suite starts one when it is unset
MYXO_TEST_PGBOUNCER  the pgbouncer in front of it, likewise
MYXO_TEST_NAMES      JSON: the database names of the aliases, for a process of a test
MYXO_TEST_SETTINGS   JSON: settings that replace those below, for a process of a test
MYXO_TEST_FILES      the folder of the test, for the files of a process of it
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

DATABASE = os.environ.get("MYXO_TEST_DATABASE", "sqlite")


def sqlite(name: str) -> dict[str, Any]:
    """Return a file in WAL mode with IMMEDIATE transactions, as the docs advise."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": name,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "timeout": 20,
        },
        "TEST": {"NAME": name},
    }


def address(kind: str) -> dict[str, Any]:
    """Return where postgres or pgbouncer is, as Django's settings have it."""
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(os.environ.get(f"MYXO_TEST_{kind.upper()}", ""))
    return {
        "NAME": parts.get("dbname") or "postgres",
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": parts.get("port", ""),
    }


def postgres(name: str | None, test_name: str) -> dict[str, Any]:
    where = address(DATABASE)
    return {
        "ENGINE": "django.db.backends.postgresql",
        **where,
        "NAME": name or where["NAME"],
        "TEST": {"NAME": test_name},
        # As Django's docs ask behind a pooler in transaction mode.
        "DISABLE_SERVER_SIDE_CURSORS": DATABASE == "pgbouncer",
    }


def database(alias: str) -> dict[str, Any]:
    name = json.loads(os.environ.get("MYXO_TEST_NAMES", "{}")).get(alias)
    test_name = f"myxo_test_{os.getpid()}_{alias}"
    if DATABASE != "sqlite":
        return postgres(name, test_name)
    return sqlite(name or str(Path(tempfile.gettempdir(), f"{test_name}.sqlite3")))


DATABASES = {alias: database(alias) for alias in ("default", "other")}

APPS_OF_PAGES = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "rangefilter",
]
INSTALLED_APPS = [
    *APPS_OF_PAGES,
    "myxo_jobs",
    "tests.app",
    "tests.worker",
    "tests.services",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
# A default storage is the tree of this project otherwise. Each test has a folder of its own.
MEDIA_ROOT = os.environ.get("MYXO_TEST_FILES") or str(
    Path(tempfile.gettempdir(), f"myxo_test_{os.getpid()}_files")
)
SECRET_KEY = "of the tests alone"
ALLOWED_HOSTS = ["*"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
USE_TZ = True
# Neither UTC nor the zone of any machine that runs the suite: a moment that
# somewhere loses its zone is 5:45 h off.
TIME_ZONE = "Asia/Kathmandu"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"myxo_jobs": {"handlers": ["stderr"], "level": "DEBUG"}},
}

globals().update(json.loads(os.environ.get("MYXO_TEST_SETTINGS", "{}")))
