"""Everything PostgreSQL and SQLite do differently, behind one interface."""

from __future__ import annotations

from functools import cache

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs.databases.base import (
    Database,
    Due,
    KeptColumns,
    Listener,
    OnSuspect,
    Row,
    ValueType,
)
from myxo_jobs.databases.floors import Floors

__all__ = [
    "Database",
    "Due",
    "Floors",
    "KeptColumns",
    "Listener",
    "OnSuspect",
    "Row",
    "ValueType",
    "database_of",
    "is_supported",
]

_SUPPORTED = ("postgresql", "sqlite")


def is_supported(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor in _SUPPORTED


def database_of(connection: BaseDatabaseWrapper | str) -> Database:
    """Return how the database of a connection, or of an alias, is spoken to.

    Raises ImproperlyConfigured for any other than PostgreSQL and SQLite.
    """
    if isinstance(connection, str):
        connection = connections[connection]
    return _database(connection.vendor)


@cache
def _database(vendor: str) -> Database:
    # Imported late, so that a project on SQLite needs no psycopg.
    if vendor == "postgresql":
        from myxo_jobs.databases.postgres import PostgreSQL

        return PostgreSQL()
    if vendor == "sqlite":
        from myxo_jobs.databases.sqlite import SQLite

        return SQLite()
    raise ImproperlyConfigured(
        f"myxo_jobs keeps its jobs in PostgreSQL or SQLite, not in {vendor}: "
        "route its models to one of those"
    )
