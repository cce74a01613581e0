"""What a figure depends on: the drive, the cores and the versions; and what a process uses."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.benchmarks import database

FLUSHES = 50
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def describe() -> str:
    """Return one line about this machine and its versions."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("Django", "psycopg", "msgspec"))
    return (
        f"{database.version()}, Python {platform.python_version()}, {packages}, "
        f"{os.cpu_count()} cores, {busy_share():.0%} of them busy with other programs, "
        f"a flush of the drive takes {flush_milliseconds():.2f} ms"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def busy_share() -> float:
    """Return the share of all cores that is in use now, while this process sleeps."""
    before = _processor_ticks()
    time.sleep(1.0)
    busy, total = (now - then for now, then in zip(_processor_ticks(), before, strict=True))
    return busy / total


def _processor_ticks() -> tuple[int, int]:
    """Return the ticks spent busy, and all, of all cores since the start of the machine."""
    user, nice, system, idle, waiting, *others = (
        int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting


def flush_milliseconds() -> float:
    """Return the median time of a small write and its fsync."""
    times = []
    with tempfile.TemporaryFile() as file:
        for _ in range(FLUSHES):
            began = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def rss_mib(pid: int) -> float:
    """Return the memory that a process holds now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * PAGE_BYTES / 2**20


def written_bytes(pid: int) -> int:
    """Return how much a process has sent to the drive's cache or the drive."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))
