"""The settings of the example site. For trying out, not for the internet."""

import os
from pathlib import Path

from example_project.database_url import database

BASE_DIR = Path(__file__).resolve().parent.parent

DEBUG = True
SECRET_KEY = "everybody-knows-this-one"
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "rangefilter",
    "myxo_jobs",
    "example_project.notes",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "example_project.strict_csp.StrictCsp",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
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
            ],
        },
    },
]
ROOT_URLCONF = "example_project.urls"
STATIC_URL = "static/"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "notes:list"
LOGOUT_REDIRECT_URL = "notes:list"

# The files of jobs are for their owners alone: in a folder that has no address.
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    "myxo_jobs": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"location": os.environ.get("NOTES_FILES") or BASE_DIR / "private_files"},
    },
}
# How long the export rests after each note, so that one can watch its bar.
EXPORT_PAUSE_SECONDS = 0.05

# A file beside manage.py, or the PostgreSQL that DATABASE_URL names.
DATABASE_URL = os.environ.get("DATABASE_URL") or "sqlite:///db.sqlite3"
DATABASES = {"default": database(DATABASE_URL, BASE_DIR)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

USE_TZ = True
TIME_ZONE = "UTC"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"myxo_jobs": {"handlers": ["console"], "level": "INFO"}},
}
