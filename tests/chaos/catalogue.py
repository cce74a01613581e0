"""All scenarios."""

from tests.chaos import callers, database, handlers, processes
from tests.chaos.scenario import SCENARIOS, Scenario

__all__ = ["CI", "SCENARIOS", "Scenario", "callers", "database", "handlers", "processes"]

# What runs before every change is accepted.
CI = ["F1", "F4", "F5", "F7", "F22", "F28", "F29", "F30", "F34", "F42"]
