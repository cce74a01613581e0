"""The list of scenarios."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.chaos.rig import POSTGRES, SQLITE, Rig

BOTH = (POSTGRES, SQLITE)

Inject = Callable[[Rig], None]


class Scenario(msgspec.Struct, frozen=True):
    """A fault, what is done in words, the databases it is for, and the function that does it."""

    fault: str
    what: str
    databases: tuple[str, ...]
    inject: Inject


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    fault: str, what: str, databases: tuple[str, ...] = BOTH
) -> Callable[[Inject], Inject]:
    """Make a function the scenario of a fault."""

    def register(inject: Inject) -> Inject:
        SCENARIOS[fault] = Scenario(fault, what, databases, inject)
        return inject

    return register
