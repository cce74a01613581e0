"""procrastinate with 20 async jobs at once; done jobs are deleted, as ours are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import procrastinate

from tests.benchmarks.evidence import write_down

DATABASE = os.environ["MYXO_PEER_DATABASE"]

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=DATABASE))


@app.task(name="noop")
async def noop(number: int) -> None:
    write_down(number)


@cache
def _putting() -> Any:
    """Return the task of the app, opened so that it puts synchronously, through a pool."""
    app.open()
    return noop


def install() -> None:
    with app.open():
        app.schema_manager.apply_schema()


def enqueue(number: int) -> None:
    _putting().defer(number=number)


def enqueue_all(numbers: Iterable[int]) -> None:
    _putting().batch_defer(*({"number": number} for number in numbers))


async def work() -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=20, delete_jobs="always")


if __name__ == "__main__":
    asyncio.run(work())
