"""Learning of new jobs at once. Polling stays the path that guarantees."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from django.db import DatabaseError, InterfaceError

from myxo_jobs.databases import Listener, database_of

logger = logging.getLogger("myxo_jobs")

WAIT_SECONDS = 0.3  # how soon the thread sees that it is to stop
RECONNECT_SECONDS = 2.0
PROBES = 2
# A listener that is still to prove itself is not waited for.
STOP_SECONDS = 1.0


class Waking:
    """A thread with a listener of its own; `wake` is told of topics, None for any."""

    def __init__(self, alias: str, wake: Callable[[set[str] | None], None]) -> None:
        self._alias = alias
        self._wake = wake
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="myxo_jobs waking", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(STOP_SECONDS)

    def _serve(self) -> None:
        while not self._stopped.is_set():
            try:
                listener = database_of(self._alias).listen(self._alias)
            except (DatabaseError, InterfaceError):
                self._stopped.wait(RECONNECT_SECONDS)
                continue
            try:
                if not self._proves_itself(listener):
                    return
                self._wake(None)  # whatever came while nobody listened
                self._listen(listener)
            except (DatabaseError, InterfaceError):
                self._stopped.wait(RECONNECT_SECONDS)
            finally:
                _close(listener)

    def _proves_itself(self, listener: Listener) -> bool:
        """Tell whether the listener hears: behind a pooler it can listen and hear nothing."""
        for _ in range(PROBES):
            if listener.hears(self._stopped.is_set) or self._stopped.is_set():
                return True
        logger.warning(
            "wake-ups do not arrive here, as behind pgbouncer in transaction mode: "
            "new jobs are found by polling"
        )
        return False

    def _listen(self, listener: Listener) -> None:
        while not self._stopped.is_set():
            topics = listener.wait(WAIT_SECONDS)
            if topics is None or topics:
                self._wake(topics)


def _close(listener: Listener) -> None:
    with suppress(DatabaseError, InterfaceError):
        listener.close()
