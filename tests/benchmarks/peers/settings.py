"""The settings of a peer that is a backend of django.tasks: MYXO_PEER names its package."""

import os
from typing import Any

from psycopg.conninfo import conninfo_to_dict

PEER = os.environ["MYXO_PEER"]
DATABASE = os.environ["MYXO_PEER_DATABASE"]


def _database() -> dict[str, Any]:
    if "://" not in DATABASE:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": DATABASE,
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
                "timeout": 20,
            },
        }
    server = conninfo_to_dict(DATABASE)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": server["dbname"],
        "USER": server.get("user", ""),
        "PASSWORD": server.get("password", ""),
        "HOST": server.get("host", ""),
        "PORT": server.get("port", ""),
    }


DATABASES = {"default": _database() | {"CONN_MAX_AGE": None}}
BACKENDS: dict[str, dict[str, Any]] = {
    "dj_queue": {
        "BACKEND": "dj_queue.backend.DjQueueBackend",
        "QUEUES": [],
        "OPTIONS": {
            "workers": [{"queues": "*", "threads": 20}],
            "preserve_finished_jobs": False,
        },
    },
    "django_ox": {"BACKEND": "django_ox.backend.OxBackend"},
    "django_tasks_db": {"BACKEND": "django_tasks_db.DatabaseBackend"},
}
TASKS = {"default": BACKENDS.get(PEER, {"BACKEND": "django.tasks.backends.dummy.DummyBackend"})}
INSTALLED_APPS = ["django.contrib.contenttypes", *([PEER] if PEER in BACKENDS else [])]
USE_TZ = True
SECRET_KEY = "of the benchmarks alone"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "root": {"level": "WARNING"},
}
