"""What the migration does on PostgreSQL alone."""

from __future__ import annotations

import subprocess
import sys

import psycopg
from psycopg.conninfo import make_conninfo

from tests.rig import ROOT, process_environment


def test_the_migration_leaves_room_for_the_new_version_of_a_row(empty_database):
    environment = process_environment(settings={"DATABASES": {"default": empty_database}})
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--verbosity", "0"],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=60,
    )
    names = {
        "NAME": "dbname",
        "USER": "user",
        "PASSWORD": "password",
        "HOST": "host",
        "PORT": "port",
    }
    address = {names[key]: value for key, value in empty_database.items() if key in names and value}
    with psycopg.connect(make_conninfo(**address)) as connection:
        row = connection.execute(
            "SELECT reloptions FROM pg_class WHERE oid = 'myxo_jobs'::regclass"
        ).fetchone()

    assert row is not None
    assert "fillfactor=50" in row[0]
    assert any(option.startswith("autovacuum_vacuum_scale_factor=") for option in row[0])
