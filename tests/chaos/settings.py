"""The settings of a run: of the process that puts and injects, and of its workers.

MYXO_CHAOS_NAME      what PostgreSQL calls the sessions of this process
MYXO_CHAOS_WITHOUT   the guard that is switched off here, for a negative control
MYXO_CHAOS_OPTIONS   JSON: further OPTIONS of its database
MYXO_CHAOS_VERSION   old: this process has not yet heard of the newest handler
MYXO_CHAOS_SERVICES  set: this process knows the services
MYXO_CHAOS_TEMP      the folder in which services write before their files are stored
"""

import json
import os
from pathlib import Path

from django.conf import global_settings

from tests.ledger import VARIABLE
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
STORAGES = {
    **global_settings.STORAGES,
    "myxo_jobs": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"location": str(Path(os.environ[VARIABLE]).with_name("files"))},
    },
}
FILE_UPLOAD_TEMP_DIR = os.environ.get("MYXO_CHAOS_TEMP")
