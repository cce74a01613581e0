"""Job services: work that a person starts, watches and fetches."""

from myxo_jobs.services.door import (
    cancel_job,
    delete_job,
    enqueue,
    get_job,
    list_jobs,
    service_stats,
    touch_job,
)
from myxo_jobs.services.service import JobService, register
from myxo_jobs.services.zip import ZipEntry, ZipFiles, ZipService

__all__ = [
    "JobService",
    "ZipEntry",
    "ZipFiles",
    "ZipService",
    "cancel_job",
    "delete_job",
    "enqueue",
    "get_job",
    "list_jobs",
    "register",
    "service_stats",
    "touch_job",
]
