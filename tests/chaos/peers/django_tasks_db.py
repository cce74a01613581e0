"""django-tasks-db has nothing that takes a task from a worker that died."""

from __future__ import annotations

from django.tasks import task

from tests.chaos.peers.peer import Peer
from tests.chaos.peers.peer import handle as do


@task
def handle(number: int) -> None:
    do(number)


PEER = Peer(
    what="db_worker",
    put=lambda number: handle.enqueue(number),
    command=("db_worker", "--interval", "0.1", "--no-startup-delay"),
)
