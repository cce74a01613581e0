"""pgqueuer on asyncpg and uvloop, in the mode in which all of its tables survive a crash."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from functools import cache
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from tests.benchmarks.evidence import write_down

DATABASE = os.environ["MYXO_PEER_DATABASE"]
BATCH = int(os.environ["MYXO_PEER_BATCH"])

_loop = uvloop.new_event_loop()


@cache
def _queries() -> Any:
    connection = _loop.run_until_complete(asyncpg.connect(DATABASE))
    return Queries(AsyncpgDriver(connection))


def install() -> None:
    _loop.run_until_complete(_queries().install())


def enqueue(number: int) -> None:
    _loop.run_until_complete(_queries().enqueue("noop", str(number).encode()))


def enqueue_all(numbers: Iterable[int]) -> None:
    payloads: list[bytes | None] = [str(number).encode() for number in numbers]
    count = len(payloads)
    _loop.run_until_complete(_queries().enqueue(["noop"] * count, payloads, [0] * count))


async def work() -> None:
    queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(DATABASE)))

    @queue.entrypoint("noop")
    async def noop(job: Any) -> None:
        write_down(int(job.payload))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queue.shutdown.set)
    await queue.run(batch_size=BATCH)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
