"""The settings of a run: of the process that puts and injects, and of its workers.

MYXO_CHAOS_NAME      what PostgreSQL calls the sessions of this process
MYXO_CHAOS_WITHOUT   the guard that is switched off here, for a negative control
MYXO_CHAOS_OPTIONS   JSON: further OPTIONS of its database
MYXO_CHAOS_VERSION   old: this process has not yet heard of the newest handler
"""

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASE, database

DATABASES = {"default": database("default")}
if DATABASE != "sqlite":
    DATABASES["default"]["CONN_MAX_AGE"] = None
    DATABASES["default"]["OPTIONS"] = {
        "application_name": os.environ.get("MYXO_CHAOS_NAME", "chaos"),
        **json.loads(os.environ.get("MYXO_CHAOS_OPTIONS", "{}")),
    }
INSTALLED_APPS = ["myxo_jobs", "tests.chaos"]
MIDDLEWARE = []
TEMPLATES = []
ROOT_URLCONF = ""
