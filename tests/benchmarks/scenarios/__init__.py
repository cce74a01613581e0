"""The scenarios, one module for each kind; importing them fills the list."""

from tests.benchmarks.scenarios import claims, drains, idle, latency, puts

__all__ = ["claims", "drains", "idle", "latency", "puts"]
