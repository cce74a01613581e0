"""What a peer's putting process does. Each peer's module says how it puts one and many."""

from __future__ import annotations

import time
from importlib import import_module
from types import ModuleType
from typing import Any

from tests.benchmarks.actor import Cue


def _peer(name: str) -> ModuleType:
    return import_module(f"tests.benchmarks.peers.{name}")


def install(cue: Cue, peer: str) -> None:
    module = _peer(peer)
    cue.ready()
    module.install()


def fill(cue: Cue, peer: str, count: int) -> None:
    module = _peer(peer)
    cue.ready()
    module.enqueue_all(range(count))


def put(cue: Cue, peer: str, seconds: float) -> dict[str, float]:
    """Put one job after the other for so long; return how many, and how long it took."""
    enqueue = _peer(peer).enqueue
    enqueue(1_000_000)  # connects
    cue.ready()
    began = now = time.monotonic()
    count = 0
    while now - began < seconds:
        enqueue(1_000_001 + count)
        count += 1
        now = time.monotonic()
    return {"count": count, "seconds": now - began}


def put_many(cue: Cue, peer: str, count: int, times: int) -> dict[str, float]:
    """Put so many jobs at once, a few times."""
    module = _peer(peer)
    module.enqueue(1_000_000)
    cue.ready()
    began = time.monotonic()
    for _ in range(times):
        module.enqueue_all(range(count))
    return {"count": count * times, "seconds": time.monotonic() - began}


def put_at_a_pace(cue: Cue, peer: str, first: int, pauses: list[float]) -> list[Any]:
    """Put a job after each pause; return each one's number and the moment before its put."""
    enqueue = _peer(peer).enqueue
    enqueue(-1)
    cue.ready()
    moments = []
    planned = time.monotonic()
    for number, pause in enumerate(pauses, first):
        planned += pause
        time.sleep(max(planned - time.monotonic(), 0.0))
        moments.append((number, time.monotonic()))
        enqueue(number)
    return moments
