"""django-q2 hands a task out again when it has not been acknowledged within `retry` seconds."""

from __future__ import annotations

from django_q.tasks import async_task

from tests.chaos.peers.peer import Peer, children

WORKERS = 4


def workers(cluster: int) -> list[int]:
    """Return the workers; the monitor and the pusher are the last two of the first processes."""
    found = []
    for sentinel in children(cluster):
        living = children(sentinel)
        first = _first.setdefault(sentinel, living[: WORKERS + 2])
        found += [pid for pid in living if pid not in first[WORKERS:]]
    return found


_first: dict[int, list[int]] = {}

PEER = Peer(
    what="qcluster, 4 workers, timeout 4, retry 5",
    put=lambda number: async_task("tests.chaos.peers.peer.handle", number),
    command=("qcluster",),
    times=1,
    workers=workers,
)
