"""Ours: alone, and under its supervisor."""

from __future__ import annotations

from myxo_jobs import Jobs
from tests.chaos.jobs import Leased, Short
from tests.chaos.peers.peer import PROCESSES, Peer, children

jobs = Jobs()

PEER = Peer(
    what="runjobs, lease=5",
    put=lambda number: jobs.put(Leased(number)),
    command=("runjobs",),
)
SUPERVISED = Peer(
    what="runjobs --processes 4",
    put=lambda number: jobs.put(Short(number)),
    command=("runjobs", "--processes", str(PROCESSES)),
    times=1,
    workers=children,
)
