"""All scenarios."""

from tests.chaos import callers, database, handlers, pooler, processes, sqlite
from tests.chaos.scenario import SCENARIOS as FOUND
from tests.chaos.scenario import Scenario

__all__ = [
    "CI",
    "SCENARIOS",
    "Scenario",
    "callers",
    "database",
    "handlers",
    "pooler",
    "processes",
    "sqlite",
]

SCENARIOS = {fault: FOUND[fault] for fault in sorted(FOUND, key=lambda name: int(name[1:]))}

# What runs before every change is accepted.
CI = ["F1", "F4", "F5", "F7", "F22", "F28", "F29", "F30", "F34", "F42"]
