"""Connections that go to the server itself, also where a pooler stands before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from tests.rig import wait_until
from tests.settings import address


@contextmanager
def straight_to_the_server() -> Iterator[None]:
    """Let what is connected meanwhile go to the server itself."""
    with pytest.MonkeyPatch.context() as patch:
        for key in ("HOST", "PORT", "USER", "PASSWORD"):
            patch.setitem(connection.settings_dict, key, address("postgres")[key])
        yield


@contextmanager
def connected_to_the_server() -> Iterator[BaseDatabaseWrapper]:
    """Connect beside the test's own connection, and beside a pool that may be used up."""
    other = connections.create_connection("default")
    with straight_to_the_server():
        other.ensure_connection()
    with closing(other):
        yield other


SESSIONS = (
    "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)


def cut_all_sessions() -> None:
    """End every session on the test's database: its own, and those of a pooler too."""
    with connected_to_the_server() as other, other.cursor() as cursor:
        cursor.execute(f"SELECT pid, pg_terminate_backend(pid) {SESSIONS}")
        cut = [pid for pid, _ in cursor.fetchall()]

        def remain() -> bool:
            cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = ANY (%s)", [cut])
            return bool(cursor.rowcount)

        wait_until(lambda: not remain(), because="the sessions have ended")
