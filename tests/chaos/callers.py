"""Faults of those who put: transactions that take long, unknown topics, races for a key."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import msgspec
from django.db import connection
from django.db.models.functions import Now

from myxo_jobs import Jobs, PayloadInvalid
from tests.chaos.jobs import Echo, Flood, Long, Newest, Once, Rare
from tests.chaos.oracle import Put
from tests.chaos.rig import POSTGRES, ROOT, Loss, Rig, worker_environment
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


@scenario("F32", "payloads of another version: a field added, removed, renamed, of another type")
def payloads_are_of_another_version(rig: Rig) -> None:
    from myxo_jobs.models import Job

    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily()
    rig.warm_up()
    misfits, fits = [], []
    for _ in rig.moments(0.05, 0.2):
        number = rig.oracle.number()
        misfits += [
            _insert({"number": number}),
            _insert({"number": number, "added": "a text"}),
            _insert({"number": number, "renamed": 1}),
        ]
        fits.append(_insert({"number": number, "added": 1, "removed": 2}))
    rig.wait_until_drained()
    rows = {row.pk: row for row in Job.objects.filter(pk__in=misfits)}
    rig.bites = len(rows)
    begun = {line.job for line in rig.begun()}
    for job_id in misfits:
        row = rows.get(job_id)
        well = row and row.failed and row.attempts == 1 and "added" in row.error
        rig.expect(bool(well) and job_id not in begun, f"a misfit ended as {row and row.error}")
    rig.expect(begun.issuperset(fits), "a payload with a field too many did not run")
    rig.run_again.update(misfits)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE myxo_jobs SET failed = false, attempts = 0, payload = %s WHERE failed",
            ['{"number": 0, "added": 1}'],
        )
    rig.wait_until_drained()
    rig.expect(begun_all(rig, misfits), "a mended payload did not run")


def _insert(payload: dict[str, Any]) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO myxo_jobs (topic, payload) VALUES ('chaos.Changed', %s) RETURNING id",
            [msgspec.json.encode(payload).decode()],
        )
        return int(cursor.fetchone()[0])


def begun_all(rig: Rig, ids: list[int]) -> bool:
    """Tell whether all of these jobs have been run."""
    return {line.job for line in rig.begun()}.issuperset(ids)


@scenario("F33", "payloads of 1, 10 and 300 MB")
def payloads_are_huge(rig: Rig) -> None:
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(rate=20.0)
    rig.warm_up()
    rig.bites = 0
    for number, _ in enumerate(rig.moments(0.3, 0.6)):
        size = (1_050_000, 10_000_000, 300_000_000)[number % 3 if number < 3 else 0]
        try:
            Jobs().put(Echo(rig.oracle.number(), "x" * size))
            rig.violate(f"a payload of {size:,} bytes was put")
        except PayloadInvalid as error:
            rig.bite()
            told = re.search(r"has ([\d,]+) bytes, .* allows 1,048,576;", str(error))
            well = told is not None and int(told[1].replace(",", "")) > size
            rig.expect(well, f"the sizes are not told: {error}")
        rig.oracle.put(Echo(rig.oracle.number(), "x" * 1_000_000))
    _check_echoes(rig)


ODD_VALUES: list[Any] = [
    "a \0 inside",
    "\0" * 1000,
    "\U0001f41b and \u2028",
    10**18,
    2**64 - 1,
    -(2**63),
    1e308,
    5e-324,
    0.1 + 0.2,
    "1e400000",
    {"": {"": [[], {}, None, True]}},
    {"\0": "\0"},
    "\\u0000 written out",
]


@scenario("F35", "payloads that JSON takes and a database might not")
def payloads_are_odd(rig: Rig) -> None:
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(rate=20.0)
    rig.warm_up()
    rig.bites = 0
    refused: list[Any] = ["half a pair \ud83d", float("inf"), float("nan"), _nested(100_000)]
    for _ in rig.moments(0.02, 0.1):
        rig.oracle.put(Echo(rig.oracle.number(), rig.random.choice(ODD_VALUES)))
        rig.oracle.put(Echo(rig.oracle.number(), _nested(rig.random.randrange(1, 200))))
        try:
            Jobs().put(Echo(rig.oracle.number(), rig.random.choice(refused)))
            rig.violate("a payload was put that does not come back")
        except PayloadInvalid:
            rig.bite()
    _check_echoes(rig)
    _check_foreign(rig)


# What others can write into the table, and nobody can read.
FOREIGN = (
    "",
    '{"number": 1',
    '{"number": 1, "value": 1e400000}',
    '{"number": 1, "value": "\\ud83d"}',
    '{"number": 1, "value": ' + "[" * 100_000 + "]" * 100_000 + "}",
)


def _check_foreign(rig: Rig) -> None:
    """Check that what was put by SQL and does not decode fails at once, or runs."""
    from myxo_jobs.models import Job

    with connection.cursor() as cursor:
        for payload in FOREIGN:
            cursor.execute(
                "INSERT INTO myxo_jobs (topic, payload) VALUES ('chaos.Echo', %s)", [payload]
            )
    rig.wait_until_drained()
    begun = {line.job for line in rig.begun()}
    rows = list(Job.objects.filter(topic="chaos.Echo", failed=True))
    rig.bites = (rig.bites or 0) + len(rows)
    rig.expect(len(rows) == len(FOREIGN), f"{len(rows)} of {len(FOREIGN)} have failed")
    for row in rows:
        well = row.attempts == 1 and "PayloadInvalid" in row.error and row.pk not in begun
        rig.expect(well, f"{row.payload[:50]} ended as {row.attempts} {row.error[:200]}")
        rig.discarded.add(row.pk)
        row.delete()


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _check_echoes(rig: Rig) -> None:
    """Check that every request came to its handler as it was put."""
    rig.wait_until_drained()
    came = {line.job: line.value for line in rig.ledger.lines("echo")}
    for put in rig.oracle.puts:
        if isinstance(put.request, Echo):
            digest = hashlib.sha256(msgspec.json.encode(put.request.value)).hexdigest()
            same = came.get(put.job_id or 0) == digest
            rig.expect(same, f"came as another one: {str(put.request)[:200]}")


@scenario(
    "F44", "a hundred thousand jobs due at one moment, fifty idle workers, a rare topic beside them"
)
def many_are_due_at_once(rig: Rig) -> None:
    from myxo_jobs.models import Job

    # An SQLite file has one writer at a time: fewer workers, fewer jobs.
    processes, count = (50, 100_000) if rig.database == POSTGRES else (10, 20_000)
    if rig.database == POSTGRES:
        connection.close()
        rig.server.stop("fast")
        rig.server.start(max_connections=processes * 9)
    rig.start_workers("--topics", "chaos.Flood,chaos.Rare", processes=processes)
    rig.warm_up(8.0)
    _expect_idle(rig, processes, "before")
    rig.put_steadily(rate=10.0, make=lambda number, chance: Rare(number))
    requests = [Flood(rig.oracle.number()) for _ in range(count)]
    rig.bites = Jobs().put_many(requests, delay=3600)
    Job.objects.filter(topic="chaos.Flood").update(due=Now())
    due_at = time.monotonic()
    before = _transactions()
    rig.drain_seconds = 600.0
    rig.wait_until(
        lambda: not Job.objects.filter(topic="chaos.Flood").exists(),
        because="all are done",
        within=rig.drain_seconds,
    )
    took = time.monotonic() - due_at
    used = _transactions() - before
    rig.wait_until_drained()
    rig.notes.append(f"{count / took:,.0f} jobs/s, {used / took:,.0f} transactions/s")
    rig.expect(used < count / 2, f"{used:,} transactions for {count:,} jobs: no batches")
    time.sleep(2.0)
    _expect_idle(rig, processes, "after")
    _check_starts(rig, {request.number for request in requests}, due_at)


def _transactions() -> int:
    """Return how many transactions the server has ended; 0 where nothing counts them."""
    if connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_stat_clear_snapshot(), xact_commit + xact_rollback "
            "FROM pg_stat_database WHERE datname = current_database()"
        )
        return int(cursor.fetchone()[1])


def _expect_idle(rig: Rig, processes: int, when: str) -> None:
    """Check that idle workers ask the server seldom, once it has counted what came before."""
    for _ in range(6):
        before = _transactions()
        time.sleep(5.0)
        rate = (_transactions() - before) / 5.0
        if rate < processes * 3:
            return
    rig.violate(f"{rate:.0f} transactions/s of idle workers {when} the flood")


def _check_starts(rig: Rig, numbers: set[int], due_at: float) -> None:
    begins = rig.begun()
    of_work = [line for line in begins if int(line.name) in numbers]
    rig.expect(len(of_work) == len(numbers), f"{len(of_work)} starts of {len(numbers)} jobs")
    rig.recoveries.append(of_work[0].at - due_at)
    first = {line.job: line.at for line in reversed(begins)}
    waits = [
        first[put.job_id] - put.at
        for put in rig.oracle.puts
        if put.job_id in first and isinstance(put.request, Rare)
    ]
    rig.notes.append(f"a rare job waited {max(waits):.2f} s at most")
    rig.expect(max(waits) < 2.0, f"a rare job waited {max(waits):.1f} s beside the many")


@scenario("F54", "a module of handlers that cannot be imported; interpreters that end")
def modules_are_broken(rig: Rig) -> None:
    rig.start_workers()
    rig.put_steadily()
    rig.warm_up()
    environment = {**os.environ, "MYXO_CHAOS_VERSION": "broken"}
    rig.bites = 0
    for _ in rig.moments(0.5, 1.0):
        for command in ("runjobs", "check"):
            ended = subprocess.run(
                [sys.executable, "-m", "django", command],
                cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30,
            )  # fmt: skip
            rig.expect(ended.returncode != 0, f"{command} starts with a broken module")
            rig.expect(
                "cannot be imported" in ended.stderr and "jobs.py" in ended.stderr,
                f"{command} does not show the module's traceback: {ended.stderr[-300:]}",
            )
            rig.bite()
        _end_an_interpreter(rig)


SHUT_DOWN = """
import django, sys, time
django.setup()
from myxo_jobs.testing import Worker
Worker(topics=["chaos.Work", "chaos.Long"]).start()
time.sleep(float(sys.argv[1]))
print("the main thread ends")
"""


def _end_an_interpreter(rig: Rig) -> None:
    """Let a process end that has a worker in it, which nobody has stopped."""
    rig.oracle.put(Long(rig.oracle.number(), 3.0))
    seconds = rig.random.uniform(0.1, 0.5)
    process = subprocess.Popen(
        [sys.executable, "-c", SHUT_DOWN, str(seconds)],
        cwd=ROOT,
        env=worker_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    now = time.monotonic()
    rig.losses.append(Loss("kill", process.pid, now - 1, now))
    rig.expect(
        process.returncode == 0 and b"the main thread ends" in output,
        f"a process with a worker ended with {process.returncode}: {output[-300:]!r}",
    )
