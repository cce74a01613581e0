"""Other queues that keep their jobs in the same database, measured in the same way.

Each has a script of ours here, with its best documented settings and persistent
connections; all of them are in the extra `bench`, but for Graphile Worker, which npm
installs. A peer that is not installed is left out, and the run says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.benchmarks.bench import Bench
from tests.benchmarks.processes import Actor


class Peer(msgspec.Struct, frozen=True):
    name: str
    jobs: int
    puts_many: bool = True

    def fill(self, count: int) -> None: ...
    def empty(self) -> None: ...
    def actor(self, verb: str, **arguments: object) -> Actor: ...


def contestants(bench: Bench) -> Sequence[Peer]:
    return ()


DJANGO_PEER_NAMES = ("dj-queue", "django-ox", "django-tasks-db")


def install(bench: Bench) -> Bench:
    return bench
