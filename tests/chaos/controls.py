"""Negative controls: worker processes in which the one function that holds a guard does not.

The suite must then fail, or it proves nothing. The product has no switch for this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class Control(msgspec.Struct, frozen=True):
    """A guard, how to switch it off, and the faults that must then be noticed."""

    switch_off: Callable[[], None]
    faults: tuple[str, ...]
    what: str


def _without_token() -> None:
    """End and renew claims by the job's id alone: whoever holds the job now."""
    from myxo_jobs.databases import database_of

    database: Any = type(database_of("default"))

    def unguarded(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(self: Any, connection: Any, *values: Any, **named: Any) -> Any:
            held = _held_by_anybody(connection, values[place])
            return function(self, connection, *values[:place], held, *values[place + 1 :], **named)

        return call

    database.delete_held = unguarded(database.delete_held, 0)
    database.update_held = unguarded(database.update_held, 2)


def _held_by_anybody(connection: Any, held: Sequence[Any]) -> list[Any]:
    from myxo_jobs.models import Job

    rows = Job.objects.using(connection.alias).filter(pk__in=[one[0] for one in held])
    tokens = dict(rows.values_list("pk", "worker"))
    return [(one[0], tokens.get(one[0], one[1]), *one[2:]) for one in held]


def _without_renewal() -> None:
    """Believe that every claim was renewed."""
    from myxo_jobs import queue

    queue.renew_for = lambda connection, claims: {claim.held[0] for claim, _ in claims}


def _without_fallback() -> None:
    """Never settle row by row: a batch that is refused is sent again as it is."""
    from myxo_jobs.worker.settling import Settling

    def keep(self: Any, connection: Any, outcome: Any) -> None:
        self._keep_for_later(outcome)

    Settling._store_alone = keep  # type: ignore[method-assign]


def _without_full_passes() -> None:
    """Begin every claim and look where the one before found its first job."""
    from myxo_jobs.databases import Floors

    def at(self: Any, now: float) -> Any:
        return sorted(self._floors.items(), reverse=True) or None

    Floors.at = at  # type: ignore[method-assign]


CONTROLS = {
    "token": Control(
        _without_token, ("F4", "F4-services"), "the token in the statements that end a claim"
    ),
    "renewal": Control(_without_renewal, ("F30",), "the renewal of claims"),
    "fallback": Control(_without_fallback, ("F34",), "settling row by row what a batch cannot"),
    "full pass": Control(
        _without_full_passes, ("F29",), "the passes that look before where the last one began"
    ),
}


def environment(name: str | None) -> dict[str, str]:
    """Return what a worker process needs in its environment to be without a guard."""
    return {"MYXO_CHAOS_WITHOUT": name} if name else {}


def of_this_run() -> str | None:
    """Return the guard that this run's workers are without."""
    return os.environ.get("MYXO_CHAOS_CONTROL")
