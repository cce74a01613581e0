"""Durable background jobs in the database a Django project already has."""

from myxo_jobs.errors import (
    Cancelled,
    ClaimLost,
    GiveUp,
    HandlerConflict,
    HandlerInvalid,
    JobsError,
    JobTimeout,
    OwnTransactionImpossible,
    PayloadInvalid,
    PayloadTypeInvalid,
    ResultInvalid,
    Retry,
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
    "OwnTransactionImpossible",
    "PayloadInvalid",
    "PayloadTypeInvalid",
    "ResultInvalid",
    "Retry",
    "Run",
    "SettingsInvalid",
    "Snooze",
    "WorkerLost",
    "job",
]
