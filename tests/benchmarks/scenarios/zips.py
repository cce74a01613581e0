"""Archives of very many files and of a very large one: whether they are sound, what they cost."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks import database, machine
from tests.benchmarks.bench import Bench, scenario
from tests.benchmarks.evidence import Void
from tests.benchmarks.processes import program
from tests.benchmarks.reports import OURS, Report, at_most

FILES = 70_000
LARGE_BYTES = 4_500_000_000
FOLDER = "MYXO_BENCHMARK_FILES"
PATIENCE = 900.0
WHICH = ("many", "large")
DESCRIPTORS, PAYLOAD = "entries with a data descriptor", "bytes of payload"
GROWTH = {which: f"MiB of growth for {which}" for which in WHICH}
MARKS = [
    *(at_most(GROWTH[which], 100) for which in WHICH),
    at_most(DESCRIPTORS, 0),
    at_most(PAYLOAD, 1024),
]


@scenario(
    f"a zip of {FILES:,} small files, and one of a sparse file of {LARGE_BYTES / 1e9:g} GB, "
    "both sound by `unzip -t`",
    postgres=MARKS,
    sqlite=MARKS,
)
def zips(bench: Bench, report: Report) -> None:
    database.empty()
    with tempfile.TemporaryDirectory(prefix="myxo-zips-") as name:
        folder = Path(name)
        (folder / "many").mkdir()
        (folder / "large").mkdir()
        for number in range(bench.scaled(FILES)):
            (folder / f"many/{number:06}.txt").write_text(f"note {number}\n" * (number % 50))
        with (folder / "large/large.bin").open("wb") as file:
            file.truncate(bench.scaled(LARGE_BYTES))
        for which in WHICH:
            _measure(folder, which, report)


def _measure(folder: Path, which: str, report: Report) -> None:
    from myxo_jobs.models import Job
    from myxo_jobs.services import enqueue, get_job

    command = [sys.executable, "-m", "django", "runjobs", "--topics", "benchmark.zip"]
    environment = {FOLDER: str(folder), "TMPDIR": str(folder)}
    with program(command, until=" started using=", environment=environment) as pid:
        _run(enqueue("benchmark.zip", {"folder": "nothing"}))  # what is loaded once, is
        uid = enqueue("benchmark.zip", {"folder": which})
        payload = Job.objects.values_list("payload", flat=True).get(uid=uid)
        began = time.monotonic()
        with _most_memory(pid) as growth:
            _run(uid)
        took = time.monotonic() - began
        job = get_job(uid)
    if job is None or job.status != "done":
        raise Void(f"the job of {which} has failed: {job and job.error}")
    archive = folder / job.result["file"]
    if subprocess.run(["unzip", "-qt", archive], stdout=subprocess.DEVNULL).returncode:
        raise Void(f"unzip finds the archive of {which} unsound")
    with zipfile.ZipFile(archive) as opened:
        entries = opened.infolist()
    expected = len(list((folder / which).iterdir()))
    if len(entries) != expected:
        raise Void(f"{len(entries)} of {expected} files are in the archive of {which}")
    report.add(GROWTH[which], OURS, max(growth))
    report.add(DESCRIPTORS, OURS, sum(bool(entry.flag_bits & 8) for entry in entries))
    report.add(PAYLOAD, OURS, len(payload.encode()))
    report.add(f"s for {which}", OURS, took)


def _run(uid: str) -> None:
    from myxo_jobs.services import get_job

    deadline = time.monotonic() + PATIENCE
    while (job := get_job(uid)) is None or job.status not in ("done", "failed"):
        if time.monotonic() > deadline:
            raise Void("the archive was not made in time")
        time.sleep(0.05)


@contextmanager
def _most_memory(pid: int) -> Iterator[list[float]]:
    """Watch the memory of a process; give by how many MiB it has been above the start."""
    start, ended = machine.rss_mib(pid), threading.Event()
    growth = [0.0]

    def watch() -> None:
        while not ended.wait(0.05):
            growth.append(machine.rss_mib(pid) - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield growth
    finally:
        ended.set()
        watcher.join()
