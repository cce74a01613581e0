"""Django's `flush`, which empties the database after each test that commits, but quicker."""

from __future__ import annotations

from typing import Any

from django.core.management.color import no_style
from django.core.management.commands import flush
from django.db import connections

# What `migrate` has written, and no test changes.
STAYS = {"django_content_type", "auth_permission"}


class Command(flush.Command):
    def handle(self, **options: Any) -> None:
        """Empty the tables that hold rows, when a test is over: to empty all takes longer.

        What `migrate` writes stays, instead of being written anew. Django's tests alone ask
        for the sequences to go on.
        """
        if options.get("reset_sequences", True):
            super().handle(**options)
            return
        connection = connections[options["database"]]
        there = connection.introspection.django_table_names(only_existing=True, include_views=False)
        tables = sorted({*there} - STAYS)
        quoted = [(table, connection.ops.quote_name(table)) for table in tables]
        with connection.cursor() as cursor:
            cursor.execute(
                " UNION ALL ".join(
                    f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {name})"
                    for table, name in quoted
                )
            )
            filled = [table for (table,) in cursor.fetchall()]
        # What refers to these tables is emptied with them: all of it is of the test.
        statements = connection.ops.sql_flush(
            no_style(), filled, reset_sequences=False, allow_cascade=True
        )
        connection.ops.execute_sql_flush(statements)
