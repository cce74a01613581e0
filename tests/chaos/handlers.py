"""Faults of handlers: what kills the process, what cannot be stored, what never ends."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import msgspec
from django.db import connection

from tests.chaos import zoo
from tests.chaos.jobs import (
    HANG_ATTEMPTS,
    POISON_ATTEMPTS,
    POISONS,
    AsyncHang,
    Dirt,
    Frozen,
    Hang,
    Leak,
    Litter,
    Poison,
    Zoo,
)
from tests.chaos.oracle import Put
from tests.chaos.rig import POSTGRES, Rig, Tree, level_of, short_work
from tests.chaos.scenario import scenario

FROZEN_SECONDS = 8.0


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
    rig.bites = _check_failed(rig, poisons, POISON_ATTEMPTS, "WorkerLost")


def _check_failed(rig: Rig, puts: list[Put], attempts: int, cause: str) -> int:
    """Check that jobs have failed after so many starts, telling a cause; return the starts."""
    from myxo_jobs.models import Job

    rows = {row["id"]: row for row in Job.objects.values("id", "status", "attempts", "error")}
    begins = Counter(line.job for line in rig.begun())
    for put in puts:
        row = rows.get(put.job_id or 0, {})
        starts = begins[put.job_id or 0]
        rig.expect(row.get("status") == "failed", f"{put.request} ended as {row}")
        rig.expect(
            starts == row.get("attempts") == attempts,
            f"{put.request} was started {starts} times, not {attempts}: {row}",
        )
        rig.expect(cause in row.get("error", ""), f"{put.request} tells no cause: {row}")
    return sum(begins[put.job_id or 0] for put in puts)


@scenario("F23", "a handler that keeps a megabyte of each job, with --max-rss")
def handlers_leak(rig: Rig) -> None:
    alone = rig.start_workers("--max-rss", "150")
    supervised = rig.start_workers("--max-rss", "150", processes=2)
    rig.put_steadily(rate=60.0, make=lambda number, chance: Leak(number))
    rig.warm_up(0.5)
    rig.levels = {}  # they shall grow
    for _ in rig.moments(0.5, 1.0):
        for tree in (alone, supervised):
            used = level_of(tree).rss_mib
            rig.expect(used < 150 + 100, f"{used:.0f} MiB used in spite of --max-rss 150")
    rig.wait_until_drained()
    rig.bites = sum(tree.log().count(" is worn") for tree in (alone, supervised))
    used_attempts = [line for line in rig.begun() if line.attempt > 1]
    rig.expect(not used_attempts, f"attempts used by a replacement: {used_attempts[:3]}")


@scenario(
    "F24", "handlers that never end: in Python, a lock, C that keeps the interpreter, the kernel"
)
def handlers_hang(rig: Rig) -> None:
    with _disk(rig) as disk:
        _hang(rig, disk)


def _hang(rig: Rig, disk: Path | None) -> None:
    environment = {"MYXO_CHAOS_DISK": str(disk)}
    alone = rig.start_workers("--grace", "2", **environment)
    rig.start_workers("--grace", "2", processes=2, **environment)
    rig.put_steadily(rate=30.0)
    rig.warm_up()
    hangs = []
    hows = [*zoo.HANGS, "in the loop"]
    # Alone, C code that keeps the interpreter leaves it no way but to exit.
    with rig.started_again(alone):
        for place, _ in enumerate(rig.moments(1.5, 2.5)):
            how = hows[place % len(hows)]
            number = rig.oracle.number()
            request = AsyncHang(number) if how == "in the loop" else Hang(number, how)
            hangs.append(rig.oracle.put(request))
        if disk is not None:
            _freeze(rig, disk)
        rig.wait_until_drained()
    rig.bites = _check_failed(rig, hangs, HANG_ATTEMPTS, "JobTimeout")


@contextmanager
def _disk(rig: Rig) -> Iterator[Path | None]:
    """Mount a disk that can be frozen; None where this machine does not permit that."""
    image, folder = rig.folder / "image", rig.folder / "disk"
    folder.mkdir()
    try:
        for command in (["truncate", "-s", "16M"], ["mkfs.ext4", "-q"]):
            subprocess.run([*command, image], check=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rig.notes.append(f"no disk can be frozen here: {error}")
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _freeze(rig: Rig, disk: Path) -> None:
    """Freeze the disk for longer than a timeout, the grace and what follows it, and a lease."""
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    try:
        puts = [rig.oracle.put(Frozen(rig.oracle.number())) for _ in range(2)]
        ids = {put.job_id for put in puts}
        rig.wait_until(
            lambda: ids <= {line.job for line in rig.begun()}, because="jobs meet the frozen disk"
        )
        time.sleep(FROZEN_SECONDS)
    finally:
        subprocess.run(["fsfreeze", "-u", disk], check=True)


@scenario("F25", "handlers that change what belongs to the whole process, or raise what ends it")
def handlers_change_the_process(rig: Rig) -> None:
    # Where only this topic runs, one job at a time, each next one must find all as it was.
    trees = [
        rig.start_workers("--topics", "chaos.Litter"),
        rig.start_workers("--topics", "chaos.Litter", processes=1),
        rig.start_workers("--exclude", "chaos.Litter", processes=2),
    ]
    rig.put_steadily(make=_litter)
    rig.warm_up()
    animals = ["system exit", "interrupt", "generator exit", "base"]
    strange = [
        rig.oracle.put(Zoo(rig.oracle.number(), rig.random.choice(animals)))
        for _ in rig.moments(0.05, 0.2)
    ]
    rig.wait_until_drained()
    rig.bites = _check_failed(rig, strange, 2, "")
    looks = {
        put.job_id
        for put in rig.oracle.puts
        if isinstance(put.request, Litter) and put.request.what == "nothing"
    }
    rig.bites += sum(line.job in looks for line in rig.begun())
    for tree in trees:
        tree.send(signal.SIGTERM)
        rig.expect(tree.wait(5) == 0, "a worker with changed surroundings did not drain")
        rig.restart(tree)


def _litter(number: int, chance: Random) -> msgspec.Struct:
    if number % 4 > 1:
        return short_work(number, chance)
    what = ("no stdout", "a folder", "a mask", "a signal handler", "a locale")
    # Beside others a job may meet what one that still runs has changed.
    return Litter(number, chance.choice(what) if number % 4 else "nothing")


@scenario("F26", "handlers that fork, or leave a child or a thread behind")
def handlers_leave_processes(rig: Rig) -> None:
    trees = [rig.start_workers(), rig.start_workers(processes=2)]
    rig.put_steadily(make=_leavings)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(0.2, 0.5):
        rig.bites += sum(len(tree.descendants()) > tree.processes for tree in trees)
        shared = _shared_sockets(trees)
        rig.expect(not shared, f"sockets of two processes: {shared}")
    rig.wait_until_drained()
    for tree in trees:
        told = tree.log().count(" have left behind: ")
        rig.expect(0 < told <= tree.processes, f"told {told} times of what was left behind")
        rig.wait_until(partial(_has_no_copies, tree), because="forked copies of a worker end")


def _shared_sockets(trees: list[Tree]) -> list[str]:
    """Return the sockets that more than one worker process or supervisor has open."""
    pids = [pid for tree in trees for pid in {tree.pid, *tree.workers()}]
    opened = Counter(socket for pid in pids for socket in _sockets(pid))
    return [socket for socket, times in opened.items() if times > 1]


def _sockets(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(str(descriptor.readlink()))
    return {target for target in found if target.startswith("socket:")}


def _has_no_copies(tree: Tree) -> bool:
    others = set(tree.descendants()) - set(tree.workers())
    return not any(_sockets(pid) for pid in others)


def _leavings(number: int, chance: Random) -> msgspec.Struct:
    what = ("a fork", "a fork that comes back", "a child", "a thread")
    return Litter(number, chance.choice(what)) if number % 10 == 0 else short_work(number, chance)


@scenario("F27", "handlers that leave a transaction, a setting or a lock in their connection")
def handlers_leave_connections_dirty(rig: Rig) -> None:
    rig.expected_log = [r'ERROR:  column "nothing_of_this_name" does not exist']
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(rate=30.0)
    rig.warm_up()
    kinds = [what for what in zoo.DIRT if rig.database == POSTGRES or what not in zoo.ONLY_POSTGRES]
    rig.bites = 0
    for _ in rig.moments(0.02, 0.1):
        what = rig.random.choice(kinds)
        rig.oracle.put(Dirt(rig.oracle.number(), what))
        rig.oracle.put(Dirt(rig.oracle.number(), "nothing"))
        rig.bites += what != "nothing"
    rig.wait_until_drained()
    if rig.database == POSTGRES:
        rig.wait_until(_nothing_is_left_open, because="no idle session keeps a lock", within=3)


def _nothing_is_left_open() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity LEFT JOIN pg_locks USING (pid) "
            "WHERE application_name = 'chaos-worker' "
            "AND (state LIKE 'idle in%' OR (state = 'idle' AND locktype IS NOT NULL))"
        )
        return bool(cursor.fetchone() == (0,))


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
