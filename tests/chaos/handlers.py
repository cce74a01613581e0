"""Faults of handlers: what kills the process, what cannot be stored, what never ends."""

from __future__ import annotations

from random import Random

import msgspec
from django.db import connection

from tests.chaos import zoo
from tests.chaos.jobs import POISON_ATTEMPTS, POISONS, Poison, Zoo
from tests.chaos.rig import POSTGRES, Rig, short_work
from tests.chaos.scenario import scenario


@scenario("F22", "handlers that end their process: segfault, exit, abort, stack overflow, kill")
def handlers_kill(rig: Rig) -> None:
    rig.start_workers(processes=2)
    rig.put_steadily(rate=40.0)
    rig.warm_up()
    poisons = []
    for number, _ in enumerate(rig.moments(0.8, 1.6)):
        how = list(POISONS)[number % len(POISONS)]
        poisons.append(rig.oracle.put(Poison(rig.oracle.number(), how)))
    rig.wait_until_drained()
    from myxo_jobs.models import Job

    rows = {row["id"]: row for row in Job.objects.values("id", "status", "attempts", "error")}
    begins = rig.begun()
    rig.bites = 0
    for put in poisons:
        row = rows.get(put.job_id or 0, {})
        starts = sum(line.job == put.job_id for line in begins)
        rig.bites += starts
        rig.expect(row.get("status") == "failed", f"{put.request} ended as {row}")
        rig.expect(
            starts == row.get("attempts") == POISON_ATTEMPTS,
            f"{put.request} was started {starts} times, not {POISON_ATTEMPTS}: {row}",
        )
        rig.expect("WorkerLost" in row.get("error", ""), f"{put.request} tells no cause: {row}")


@scenario("F34", "errors that cannot be stored as they are, and one that cannot be stored at all")
def errors_are_strange(rig: Rig) -> None:
    rig.expected_log = [r'ERROR:  new row .* violates check constraint "chaos_refusal"']
    _refuse(rig)
    rig.start_workers()
    rig.put_steadily(rate=20.0, make=_strange_work)
    rig.warm_up()
    for _ in rig.moments(1.0, 2.0):
        animals = rig.random.choices([name for name in zoo.ANIMALS if name != "10 MB"], k=50)
        for animal in animals:
            rig.oracle.put(Zoo(rig.oracle.number(), animal))
    rig.oracle.put(Zoo(rig.oracle.number(), "10 MB"))
    rig.wait_until_drained()
    _check_errors(rig)


def _strange_work(number: int, chance: Random) -> msgspec.Struct:
    if number % 4:
        return short_work(number, chance)
    return Zoo(number, chance.choice([name for name in zoo.ANIMALS if name != "10 MB"]))


def _refuse(rig: Rig) -> None:
    """Make the database refuse one error: a row that never can be stored."""
    if rig.database == POSTGRES:
        statement = (
            "ALTER TABLE myxo_jobs ADD CONSTRAINT chaos_refusal "
            f"CHECK (error NOT LIKE '%{zoo.REFUSED}%')"
        )
    else:
        statement = (
            "CREATE TRIGGER chaos_refusal BEFORE UPDATE ON myxo_jobs "
            f"WHEN NEW.error LIKE '%{zoo.REFUSED}%' "
            "BEGIN SELECT RAISE(ABORT, 'chaos_refusal'); END"
        )
    with connection.cursor() as cursor:
        cursor.execute(statement)


def _check_errors(rig: Rig) -> None:
    from myxo_jobs.models import Job

    rows = {row["id"]: row for row in Job.objects.values("id", "status", "attempts", "error")}
    rig.bites = 0
    for put in rig.oracle.puts:
        if not isinstance(put.request, Zoo) or put.outcome != "acknowledged":
            continue
        row = rows.get(put.job_id or 0, {})
        rig.bites += 1
        rig.expect(
            row.get("status") == "failed" and row.get("attempts") == 2 and bool(row.get("error")),
            f"{put.request} ended as {str(row)[:300]}",
        )
