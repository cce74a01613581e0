"""Procrastinate finds jobs of dead workers by their heartbeats, in a periodic task of the user.

The task is the one of its documentation, "Retry stalled jobs", every five seconds.
"""

from __future__ import annotations

from typing import Any

from procrastinate.contrib.django import app

from tests.chaos.peers.peer import Peer
from tests.chaos.peers.peer import handle as do


@app.task
def handle(number: int) -> None:
    do(number)


@app.periodic(cron="* * * * * */5")
@app.task(queueing_lock="retry_stalled_jobs", pass_context=True)
async def retry_stalled_jobs(context: Any, timestamp: int) -> None:
    for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=5):
        await app.job_manager.retry_job(job)


PEER = Peer(
    what="worker, heartbeat every 1 s, stalled after 5 s, looked for every 5 s",
    put=lambda number: handle.defer(number=number),
    command=("procrastinate", "worker", "--concurrency", "10"),
)
