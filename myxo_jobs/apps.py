"""The app: at start-up it reads the setting and imports every app's `jobs` module."""

from __future__ import annotations

import logging

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class MyxoJobsConfig(AppConfig):
    name = "myxo_jobs"
    verbose_name = _("Jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from myxo_jobs import checks, conf, logs
        from myxo_jobs.handlers import registry
        from myxo_jobs.services import rows  # noqa: F401 - a model: Django has to know it

        logging.getLogger("myxo_jobs").addFilter(logs.plain_text)
        conf.settings()
        checks.register()
        autodiscover_modules("jobs")
        registry.open()
