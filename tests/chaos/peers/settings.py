"""The settings of a project that uses one of the queues.

MYXO_PEER            which one: the name of its distribution
MYXO_TEST_POSTGRES   the server

What may make a job start again sooner after its worker died is set as low as the
queue's documentation allows; see the modules beside this one.
"""

import os

from tests.settings import postgres

PEER = os.environ["MYXO_PEER"]

DATABASES = {"default": postgres(None, "peers")}
USE_TZ = True
SECRET_KEY = "of the tests alone"
INSTALLED_APPS = {
    "myxo-jobs": ["myxo_jobs", "tests.chaos"],
    "django-tasks-db": ["django_tasks_db"],
    "procrastinate": ["procrastinate.contrib.django"],
    "django-q2": ["django_q"],
    "django-ox": ["django_ox"],
}[PEER]

if PEER == "django-tasks-db":
    TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}

if PEER == "procrastinate":
    PROCRASTINATE_IMPORT_PATHS = ["tests.chaos.peers.procrastinate"]
    PROCRASTINATE_WORKER_DEFAULTS = {
        "update_heartbeat_interval": 1.0,
        "stalled_worker_timeout": 5.0,
    }

if PEER == "django-q2":
    Q_CLUSTER = {
        "name": "chaos",
        "orm": "default",
        "workers": 4,
        "timeout": 4,
        "retry": 5,  # has to be longer than the timeout
        "queue_limit": 8,  # the wait in the cluster counts as well
        "max_attempts": 0,  # no limit
        "label": "Chaos",
    }

if PEER == "django-ox":
    TASKS = {
        "default": {
            "BACKEND": "django_ox.backend.OxBackend",
            "OPTIONS": {"LOCK_TIMEOUT": 5, "MAX_ATTEMPTS": 10},
        }
    }
