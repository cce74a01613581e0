"""Faults of those who put: transactions that take long, unknown topics, races for a key."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from django.db import connection
from django.db.models.functions import Now

from tests.chaos.jobs import Newest, Once
from tests.chaos.oracle import Put
from tests.chaos.rig import POSTGRES, Rig
from tests.chaos.scenario import scenario

PUTTERS = 50
NEWEST = "chaos.Newest"


@scenario("F28", "jobs of a topic that only the newest workers know")
def topics_are_unknown(rig: Rig) -> None:
    from myxo_jobs.models import Job

    old = rig.start_workers(processes=2, MYXO_CHAOS_VERSION="old")
    rig.put_steadily()
    rig.warm_up()
    puts = []
    half = time.monotonic() + rig.seconds / 2
    for now in rig.moments(0.02, 0.1):
        puts.append(rig.oracle.put(Newest(rig.oracle.number())))
        if now > half:
            break
    waiting = Job.objects.filter(topic=NEWEST)
    touched = waiting.exclude(status="pending", attempts=0)
    rig.expect(waiting.count() == len(puts), f"{len(puts) - waiting.count()} unknown jobs are gone")
    rig.expect(not touched.exists(), f"old workers touched {list(touched.values())[:3]}")
    rig.expect(NEWEST not in old.log(), "old workers talk of a topic that they do not know")
    rig.bites = waiting.count()
    rig.start_workers(processes=2)
    puts += [rig.oracle.put(Newest(rig.oracle.number())) for _ in rig.moments(0.02, 0.1)]
    rig.wait_until_drained()
    ids = {put.job_id for put in puts}
    begun = [line for line in rig.begun() if line.job in ids]
    rig.expect(
        len(begun) == len(puts) and all(line.attempt == 1 for line in begun),
        f"{len(begun)} starts of {len(puts)} jobs of the newest topic",
    )


@scenario("F29", "transactions that put and commit late, while younger jobs run", (POSTGRES,))
def callers_commit_late(rig: Rig) -> None:
    rig.start_workers(processes=2)
    rig.put_steadily()
    rig.warm_up()
    with ThreadPoolExecutor(3) as pool:
        late = [
            put for puts in pool.map(lambda place: _put_late(rig, place), range(3)) for put in puts
        ]
    rig.wait_until_drained()
    begins = {line.job: line.at for line in reversed(rig.begun())}
    rig.bites = 0
    for put in late:
        if put.outcome != "acknowledged" or put.job_id is None:
            continue
        begun = begins.get(put.job_id)
        if begun is None:
            rig.violate(f"{put.request} never ran")
            continue
        rig.recoveries.append(begun - put.at)
        rig.expect(begun - put.at <= 1.0, f"{put.request} began {begun - put.at:.2f} s late")
        if any(job > put.job_id and at < put.at - 0.5 for job, at in begins.items()):
            rig.bite()


def _put_late(rig: Rig, place: int) -> list[Put]:
    chance = Random(f"{rig.seed} {place}")
    longest = min(rig.seconds / 3, 60.0)
    puts = []
    while not rig.is_over():
        puts.append(
            rig.oracle.put_in_a_block(
                Once(rig.oracle.number()),
                rolls_back=chance.random() < 0.2,
                holds=chance.uniform(0.5, longest),
            )
        )
    connection.close()
    return puts


@scenario("F42", "fifty callers put one key at the same moment")
def callers_race_for_a_key(rig: Rig) -> None:
    from myxo_jobs.models import Job

    rig.start_workers(processes=2)
    rig.put_steadily(rate=10.0)
    rig.warm_up()
    rig.bites = 0
    barrier = threading.Barrier(PUTTERS)

    def put(place: int, key: str) -> Put:
        request = Once(rig.oracle.number())
        barrier.wait()
        # Due later, or the job could be done, and its key free, before the last one asks.
        options: dict[str, Any] = {"key": key, "delay": 3600}
        if place % 2:
            return rig.oracle.put(request, **options)
        return rig.oracle.put_in_a_block(request, rolls_back=place % 10 == 0, **options)

    with ThreadPoolExecutor(PUTTERS) as pool:
        for number, _ in enumerate(rig.moments(0.1, 0.5)):
            key = f"race {number}"
            puts = list(pool.map(put, range(PUTTERS), [key] * PUTTERS))
            won = [one for one in puts if one.outcome == "acknowledged"]
            rig.expect(len(won) == 1, f"{len(won)} jobs of {key}")
            rig.bites += sum(one.outcome == "key was there" for one in puts)
            Job.objects.filter(key=key).update(due=Now())
        list(pool.map(lambda _: connection.close(), range(PUTTERS)))
    rig.expect(not rig.oracle.errors, f"errors reached the callers: {rig.oracle.errors[:3]}")
