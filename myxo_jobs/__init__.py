"""Durable background jobs in the database a Django project already has."""

from myxo_jobs.errors import (
    Cancelled,
    ClaimLost,
    GiveUp,
    HandlerConflict,
    HandlerInvalid,
    JobsError,
    JobTimeout,
    KindUnknown,
    OwnTransactionImpossible,
    PayloadInvalid,
    PayloadTypeInvalid,
    ResultInvalid,
    Retry,
    ServiceInvalid,
    SettingsInvalid,
    Snooze,
    WorkerLost,
)
from myxo_jobs.handlers import Run, job
from myxo_jobs.jobs import CALLER, Jobs

__all__ = [
    "CALLER",
    "Cancelled",
    "ClaimLost",
    "GiveUp",
    "HandlerConflict",
    "HandlerInvalid",
    "JobTimeout",
    "Jobs",
    "JobsError",
    "KindUnknown",
    "OwnTransactionImpossible",
    "PayloadInvalid",
    "PayloadTypeInvalid",
    "ResultInvalid",
    "Retry",
    "Run",
    "ServiceInvalid",
    "SettingsInvalid",
    "Snooze",
    "WorkerLost",
    "job",
]
