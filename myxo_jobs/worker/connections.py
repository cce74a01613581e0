"""The Django connections of a thread that runs handlers: fit, clean and kept.

A handler's thread keeps its connections from job to job. What one job leaves behind
must not meet the next: a connection that is not as Django made it is closed, which
rolls back whatever was open, and the next job connects anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs.databases import database_of, is_supported

# After so long an idle connection is asked, not only looked at: a network that drops
# sessions silently leaves nothing to see.
ASK_AFTER_SECONDS = 10.0


class HandlerConnections:
    """The connections of the thread that made this."""

    def __init__(self) -> None:
        self._connections: dict[str, BaseDatabaseWrapper] = {}
        self._traced: set[str] = set()
        self._tidied_at = time.monotonic()
        for alias in connections:
            self._watch(alias)

    def freshen(self) -> None:
        """Before a job that was waited for: let go of connections that died meanwhile."""
        idle = time.monotonic() - self._tidied_at
        for alias, connection in self._connections.items():
            if connection.connection is None:
                continue
            if not self._is_fit(connection) or (
                idle > ASK_AFTER_SECONDS and not connection.is_usable()
            ):
                self._replace(alias)

    def tidy(self) -> None:
        """After a job: make every connection as if the job had not been."""
        for alias, connection in self._connections.items():
            if connections[alias] is not connection:
                self._replace(alias)
            else:
                self._tidy(alias, connection)
        self._tidied_at = time.monotonic()

    def close(self) -> None:
        """At the thread's end."""
        for alias in list(self._connections):
            _close(self._connections.pop(alias))

    def leave(self) -> None:
        """Between times in which the thread needs none: the next one makes this anew."""
        for alias in list(self._connections):
            self._forget(alias)
            del self._connections[alias]

    def _tidy(self, alias: str, connection: BaseDatabaseWrapper) -> None:
        connection.queries_log.clear()  # grows by each query when DEBUG is on
        if alias in self._traced or not self._is_fit(connection):
            self._replace(alias)
        elif connection.settings_dict["OPTIONS"].get("pool"):
            connection.close()  # gives it back: an idle thread holds none of the pool's

    def _is_fit(self, connection: BaseDatabaseWrapper) -> bool:
        if (
            connection.in_atomic_block
            or connection.needs_rollback
            or connection.run_on_commit
            or len(connection.execute_wrappers) != 1
        ):
            return False
        if connection.connection is None:
            return True
        if connection.errors_occurred or not connection.autocommit:
            return False
        if not is_supported(connection):
            return True
        return database_of(connection).is_fit(connection)

    def _replace(self, alias: str) -> None:
        self._forget(alias)
        self._watch(alias)

    def _forget(self, alias: str) -> None:
        _close(self._connections[alias])
        # Not only closed: a wrapper inside an atomic block that nobody will leave
        # refuses every query from then on.
        if connections[alias] is not self._connections[alias]:
            _close(connections[alias])
        del connections[alias]
        self._traced.discard(alias)

    def _watch(self, alias: str) -> None:
        connection = connections[alias]
        connection.execute_wrappers.append(self._note_traces)
        self._connections[alias] = connection

    def _note_traces(
        self,
        execute: Callable[..., Any],
        sql: Any,
        params: Any,
        many: bool,
        context: dict[str, Any],
    ) -> Any:
        connection = context["connection"]
        if is_supported(connection) and (
            not isinstance(sql, str) or database_of(connection).leaves_traces(sql)
        ):
            self._traced.add(connection.alias)
        return execute(sql, params, many, context)


def _close(connection: BaseDatabaseWrapper) -> None:
    # Out of its atomic blocks first: closing inside one only marks it as closed.
    connection.in_atomic_block = False
    connection.needs_rollback = False
    try:
        connection.close()
    except (DatabaseError, InterfaceError):
        connection.connection = None
