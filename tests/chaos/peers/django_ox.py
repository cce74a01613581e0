"""django-ox gives a task back when its lease has not been renewed for LOCK_TIMEOUT seconds.

Its own supervisor stops for good after some deaths of one worker, so that each process
is started for itself.
"""

from __future__ import annotations

from django.tasks import task

from tests.chaos.peers.peer import Peer
from tests.chaos.peers.peer import handle as do


@task
def handle(number: int) -> None:
    do(number)


PEER = Peer(
    what="ox_worker, LOCK_TIMEOUT 5",
    put=lambda number: handle.enqueue(number),
    command=("ox_worker", "--concurrency", "10", "--interval", "0.1"),
)
