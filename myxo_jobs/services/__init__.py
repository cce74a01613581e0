"""Job services: work that a person starts, watches and fetches."""

from myxo_jobs.services.document import job_document
from myxo_jobs.services.door import (
    cancel_job,
    delete_job,
    enqueue,
    get_job,
    list_jobs,
    service_stats,
    touch_job,
)
from myxo_jobs.services.download import accel, file_response, signed_redirect
from myxo_jobs.services.responses import accepted, status_response
from myxo_jobs.services.service import JobService, register
from myxo_jobs.services.zip import ZipEntry, ZipFiles, ZipService

__all__ = [
    "JobService",
    "ZipEntry",
    "ZipFiles",
    "ZipService",
    "accel",
    "accepted",
    "cancel_job",
    "delete_job",
    "enqueue",
    "file_response",
    "get_job",
    "job_document",
    "list_jobs",
    "register",
    "service_stats",
    "signed_redirect",
    "status_response",
    "touch_job",
]
