"""Removing the kept jobs whose time is over, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from django.db import DatabaseError, InterfaceError, connections

from myxo_jobs import queue
from myxo_jobs.handlers import Handler
from myxo_jobs.models import Job
from myxo_jobs.worker.connections import HandlerConnections

logger = logging.getLogger("myxo_jobs")

SWEEP_SECONDS = 10.0
LARGEST_SLICE = 1_000


class Sweeper:
    """Removes expired jobs of some handlers now and then: their cleanup first, then the row."""

    def __init__(
        self,
        alias: str,
        handlers: Sequence[Handler],
        token: Callable[[], str],
        *,
        tidies: bool = True,
    ) -> None:
        self._alias = alias
        # Files are looked up by the rows of the database that `enqueue` writes to.
        self._tidies = tidies and alias == queue.alias()
        self._handlers = {one.topic: one for one in handlers if one.keep is not None}
        self._token = token
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="myxo_jobs sweep", daemon=True)

    def start(self) -> None:
        if self._handlers:
            self._thread.start()

    def stop(self, seconds: float) -> None:
        self._stop.set()
        if self._handlers:
            self._thread.join(seconds)

    def _serve(self) -> None:
        while not self._stop.is_set():
            own = HandlerConnections()
            try:
                self.sweep()
            except (DatabaseError, InterfaceError) as error:
                # The loop tells of an outage; what was not removed is, the next time.
                logger.debug("sweep broken off: %s", error)
            except Exception:
                logger.exception("sweep failed, tried again")
            finally:
                own.leave()
            self._stop.wait(SWEEP_SECONDS)

    def sweep(self) -> None:
        """Remove what has expired."""
        self._remove_plainly([t for t, one in self._handlers.items() if one.cleanup is None])
        for handler in self._handlers.values():
            if handler.cleanup is not None:
                self._remove_cleaned(handler)
            if handler.tidy is not None and self._tidies and not self._stop.is_set():
                self._tidy(handler)

    def _tidy(self, handler: Handler) -> None:
        try:
            if handler.tidy is not None:
                handler.tidy()
        except (DatabaseError, InterfaceError):
            raise
        except Exception:  # as a storage that is away
            logger.exception("topic=%s cannot be tidied, tried again later", handler.topic)

    def _remove_plainly(self, topics: Sequence[str]) -> None:
        connection = connections[self._alias]
        while topics and not self._stop.is_set():
            job_ids = queue.expired(connection, topics, LARGEST_SLICE)
            if job_ids:
                queue.remove_expired(connection, job_ids)
            if len(job_ids) < LARGEST_SLICE:
                return

    def _remove_cleaned(self, handler: Handler) -> None:
        connection = connections[self._alias]
        while not self._stop.is_set():
            job_ids = queue.expired(connection, [handler.topic], LARGEST_SLICE)
            rows = queue.uncleaned(Job.objects.using(self._alias).filter(pk__in=job_ids))
            uncleaned = set(rows.values_list("pk", flat=True))
            # Most failed ones were cleaned up when they failed.
            cleaned = [job_id for job_id in job_ids if job_id not in uncleaned]
            if cleaned:
                queue.remove_expired(connection, cleaned)
            for job_id in uncleaned:
                if self._stop.is_set():
                    return
                queue.clean_up_and_remove(connection, job_id, handler, self._token())
            if len(job_ids) < LARGEST_SLICE:
                return
