"""The scenarios, one module for each kind; importing them fills the list."""

from tests.benchmarks.scenarios import (
    beside,
    claims,
    drains,
    idle,
    latency,
    limits,
    load,
    progress,
    puts,
    resources,
    zips,
)

__all__ = [
    "beside",
    "claims",
    "drains",
    "idle",
    "latency",
    "limits",
    "load",
    "progress",
    "puts",
    "resources",
    "zips",
]
