"""django-q2 hands a task out again when it has not been acknowledged within `retry` seconds."""

from __future__ import annotations

import psutil
from django_q.tasks import async_task

from tests.chaos.peers.peer import Peer

WORKERS = 4


def workers(process: psutil.Process) -> list[int]:
    """Return the workers; the monitor and the pusher are the last two of the first processes."""
    sentinels = process.children()
    if not sentinels:
        return []
    children = sorted(sentinels[0].children(), key=lambda child: (child.create_time(), child.pid))
    first = _first.setdefault(sentinels[0].pid, [child.pid for child in children[: WORKERS + 2]])
    spared = first[WORKERS:]
    return [child.pid for child in children if child.pid not in spared]


_first: dict[int, list[int]] = {}

PEER = Peer(
    what="qcluster, 4 workers, timeout 4, retry 5",
    put=lambda number: async_task("tests.chaos.peers.peer.handle", number),
    command=("qcluster",),
    times=1,
    workers=workers,
)
