"""What a scenario is given, and the list of scenarios."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tests.benchmarks.reports import Mark, Report

POSTGRES, SQLITE = "postgres", "sqlite"
BOTH = (POSTGRES, SQLITE)


class Bench(msgspec.Struct, frozen=True):
    """How to measure: on which database, how often and how long, and beside which peers."""

    database: str
    rounds: int
    # Shortens long scenarios, for a look while something is changed: 1.0 is their length.
    scale: float
    peers: Sequence[str] = ()

    def scaled(self, amount: int) -> int:
        return max(round(amount * self.scale), 1)


Measure = Callable[[Bench, Report], None]


class Scenario(msgspec.Struct, frozen=True):
    """What is measured, in words; the function that does it; what must be reached."""

    name: str
    what: str
    measure: Measure
    marks: dict[str, Sequence[Mark]]
    databases: Sequence[str] = BOTH


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    what: str,
    *,
    postgres: Sequence[Mark] | None = (),
    sqlite: Sequence[Mark] | None = (),
) -> Callable[[Measure], Measure]:
    """Make a function the scenario of its name. None for a database it is not for."""
    marks = {
        name: given for name, given in ((POSTGRES, postgres), (SQLITE, sqlite)) if given is not None
    }

    def register(measure: Measure) -> Measure:
        name = measure.__name__
        SCENARIOS[name] = Scenario(name, what, measure, marks, tuple(marks))
        return measure

    return register
