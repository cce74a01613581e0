"""Faults of disks: full ones, each a small tmpfs, and a slow one."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import psycopg
from django.db import connection, connections

from tests.chaos.database import LEAVING
from tests.chaos.jobs import LEASE, Echo, Zoo
from tests.chaos.leftovers import do, is_left_over, name_of, need
from tests.chaos.rig import POSTGRES, SQLITE, Rig, mixed_work, short_work
from tests.chaos.scenario import scenario
from tests.chaos.shims import preloaded

FULL = "No space left on device"


class Disk:
    """A disk of so many MiB, until the surroundings of the run are undone."""

    def __init__(self, rig: Rig, what: str, mib: int) -> None:
        need("mount", "umount")
        _sweep()
        self.path = Path(tempfile.gettempdir(), name_of(what))
        self.path.mkdir()
        rig.surroundings.callback(self.path.rmdir)
        do("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(self.path))
        rig.surroundings.callback(do, "umount", "-l", str(self.path))
        self.folder = self.path / "files"
        self.folder.mkdir(mode=0o700)
        self._filler = self.path / "filler"

    def fill(self, *, but_kib: int = 0) -> None:
        """Leave no space, or so much."""
        with self._filler.open("wb", buffering=0) as filler:
            with suppress(OSError):
                while True:
                    filler.write(bytes(4096))
            filler.truncate(filler.tell() - but_kib * 1024)

    def free(self) -> None:
        self._filler.unlink()


def _sweep() -> None:
    """Unmount what killed runs have left behind."""
    for line in Path("/proc/mounts").read_text().splitlines():
        place = line.split()[1]
        if is_left_over(place):
            do("umount", "-l", place)
            Path(place).rmdir()


@scenario("F10", "the disk of the queue's table full", (POSTGRES,))
def data_disk_is_full(rig: Rig) -> None:
    rig.expected_log = [rf"ERROR:  could not (extend|write to) file .*{FULL}"]
    disk = Disk(rig, "data", 64)
    rig.server.own(disk.path)
    rig.server.own(disk.folder)
    with psycopg.connect(rig.server.url, autocommit=True) as admin:
        admin.execute(f"CREATE TABLESPACE small LOCATION '{disk.folder}'")
        admin.execute("ALTER TABLE myxo_jobs SET TABLESPACE small")
        admin.execute("ALTER INDEX ALL IN TABLESPACE pg_default SET TABLESPACE small")
    trees = [rig.start_workers(), rig.start_workers(processes=2)]
    rig.put_steadily(make=_with_long_errors)
    rig.warm_up()
    rig.bites = 0
    _fill_again_and_again(rig, disk)
    met = sum(tree.log().count(FULL) for tree in trees)
    rig.expect(met > 0, "no worker has met the full disk")
    rig.notes.append(f"{met} times in the workers' logs")


def _with_long_errors(number: int, chance: Random) -> msgspec.Struct:
    """Return short jobs, and some whose outcome takes kilobytes."""
    return Zoo(number, "noise") if number % 20 == 0 else short_work(number, chance)


def _fill_again_and_again(rig: Rig, disk: Disk) -> None:
    """Fill a disk for longer than a lease, at random moments; each put refused is a bite."""
    for _ in rig.moments(1.0, 2.0):
        disk.fill()
        refused = _put_until_refused(rig)
        time.sleep(LEASE * rig.random.uniform(1.2, 2.0))
        disk.free()
        rig.bites += refused
        rig.measure_recovery(time.monotonic(), 5.0, "there was space again")


def _put_until_refused(rig: Rig) -> int:
    """Put until every put of some size is refused; return how many were."""
    refused = 0
    while refused < 20:
        request = Echo(rig.oracle.number(), rig.random.randbytes(20_000).hex())
        put = rig.oracle.put(request)
        refused += put.outcome == "refused"
    return refused


@scenario("F11", "the disk of the write-ahead log full, so that the server panics", (POSTGRES,))
def log_disk_is_full(rig: Rig) -> None:
    rig.expected_log = [*LEAVING, rf"(PANIC|FATAL|ERROR):  could not write to file .*{FULL}"]
    disk = Disk(rig, "wal", 160)
    server = rig.server
    connection.close()
    server.stop("fast")
    server.own(disk.path)
    shutil.copytree(server.data / "pg_wal", disk.folder, dirs_exist_ok=True)
    for path in (disk.folder, *disk.folder.rglob("*")):
        server.own(path)
    shutil.rmtree(server.data / "pg_wal")
    (server.data / "pg_wal").symlink_to(disk.folder)
    server.options |= {"min_wal_size": "32MB", "max_wal_size": "48MB"}
    server.start()
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(make=mixed_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(2.0, 4.0):
        panics = server.log().count("PANIC:")
        with rig.outage():
            disk.fill()
            _write_until(rig, panics)
            time.sleep(rig.random.uniform(1.0, 3.0))
            disk.free()
            # It may have given up, or hang in a recovery that found no space.
            if server.is_running:
                server.stop("immediate")
            server.start()
        rig.bite()
        rig.measure_recovery(time.monotonic(), 5.0, "there was space again")


def _write_until(rig: Rig, panics: int) -> None:
    """Make the server need new files for its log until it has panicked once more."""

    def has_panicked() -> bool:
        with (
            suppress(psycopg.OperationalError),
            psycopg.connect(rig.server.url, autocommit=True, connect_timeout=2) as admin,
        ):
            admin.execute("SELECT pg_switch_wal()")
        return rig.server.log().count("PANIC:") > panics

    rig.wait_until(has_panicked, because="the server panics", within=30.0)


@scenario(
    "F12", "the disk of the database's file full, and those of the log and of temp", (SQLITE,)
)
def file_disk_is_full(rig: Rig) -> None:
    disk, others = Disk(rig, "file", 24), Disk(rig, "others", 1)
    _move_file(disk)
    beside = {"TMPDIR": str(others.folder), "SQLITE_TMPDIR": str(others.folder)}
    trees = [
        rig.start_workers(log=others.folder / "log", **beside),
        rig.start_workers(processes=2, **beside),
    ]
    rig.put_steadily(make=_with_long_errors)
    rig.warm_up()
    others.fill()
    rig.bites = 0
    _fill_again_and_again(rig, disk)
    met = trees[1].log().count("disk is full")
    rig.expect(met > 0, "no worker has met the full disk")
    rig.notes.append(f"{met} times in a worker's log")


def _move_file(disk: Disk) -> None:
    """Move the SQLite file of this run to a disk, and let everybody open it there."""
    connections.close_all()
    ours = connections.settings["default"]
    old = Path(ours["NAME"])
    new = disk.folder / old.name
    for path in old.parent.glob(f"{old.name}*"):
        shutil.move(path, disk.folder)
    ours["NAME"] = str(new)
    os.environ["MYXO_TEST_NAMES"] = msgspec.json.encode({"default": str(new)}).decode()


# So long takes the slowest write or flush: statements then take at most a sixth of the
# lease, mostly, as five seconds are of the lease of thirty that handlers have by default.
SLOWEST_MS = int(LEASE / 6 * 1000)


@scenario("F13", "a slow disk: each of the server's writes and flushes takes longer", (POSTGRES,))
def disk_is_slow(rig: Rig) -> None:
    shim = preloaded(rig, "slow_disk")
    rig.expected_log = LEAVING
    connection.close()
    server = rig.server
    server.stop("fast")
    server.environment = shim | {"MYXO_SLOW_DISK_MS": str(SLOWEST_MS)}
    server.options |= {"fsync": "on", "log_min_duration_statement": 50}
    server.start()
    rig.start_workers()
    rig.start_workers(processes=2)
    rig.put_steadily(rate=30.0, make=mixed_work)
    rig.warm_up()
    for _ in rig.moments(0.5, 1.0):
        rig.measure_recovery(time.monotonic(), 5.0, "a look")
    slow = [float(ms) for ms in re.findall(r"duration: ([\d.]+) ms", server.log())]
    rig.bites = len(slow)
    rig.notes.append(f"slowest statement {max(slow, default=0) / 1000:.2f} s")
