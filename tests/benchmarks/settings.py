"""The suite's settings, but quiet, and with the drive as careful as by default.

MYXO_BENCHMARK_TIMEOUT   seconds that a connection waits for SQLite's lock
"""

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASE, INSTALLED_APPS, database

INSTALLED_APPS = [*INSTALLED_APPS, "tests.benchmarks"]
DATABASES = {"default": database("default")}  # as most projects, and the peers, have it
LOGGING = {"version": 1, "disable_existing_loggers": False}
if DATABASE == "sqlite":
    DATABASES["default"]["OPTIONS"] |= {
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
        "timeout": float(os.environ.get("MYXO_BENCHMARK_TIMEOUT", 20)),
    }

# The files of the scenario `zips`: all in one folder, which it removes.
FILES = os.environ.get("MYXO_BENCHMARK_FILES", "")
STORAGES = {
    "default": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"location": FILES},
    },
}
