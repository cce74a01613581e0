"""All scenarios."""

import re

from tests.chaos import (
    callers,
    clocks,
    database,
    disks,
    exports,
    handlers,
    horizon,
    hosts,
    pooler,
    processes,
    sqlite,
    standby,
)
from tests.chaos.scenario import SCENARIOS as FOUND
from tests.chaos.scenario import Scenario

__all__ = [
    "CI",
    "SCENARIOS",
    "Scenario",
    "callers",
    "clocks",
    "database",
    "disks",
    "exports",
    "handlers",
    "horizon",
    "hosts",
    "pooler",
    "processes",
    "sqlite",
    "standby",
]


def _place(name: str) -> tuple[bool, int, str]:
    """Return the place of a scenario in the list: by number, those with a name last."""
    number = re.match(r"F(\d+)", name)
    return (number is None, int(number[1]) if number else 0, name)


SCENARIOS = {fault: FOUND[fault] for fault in sorted(FOUND, key=_place)}

# What runs before every change is accepted.
CI = ["F1", "F4", "F5", "F7", "F22", "F28", "F29", "F30", "F34", "F42"]
