"""What a handler forks never goes on as the worker."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from myxo_jobs import Jobs
from myxo_jobs.models import Job
from tests.app.models import Note
from tests.rig import wait_until
from tests.worker.jobs import Fork, ForkAsync, ForkAtomic

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


def living_children(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            found += [int(child)] if state != "Z" else []
    return found


def test_a_copy_of_the_worker_that_a_handler_forked_runs_no_job(runjobs, ledger):
    names = [f"{number}" for number in range(40)]
    for number, name in enumerate(names):
        jobs.put(Fork(name, raises=number % 2 == 0))
        jobs.put(ForkAsync(f"async {name}"))
        jobs.put(ForkAtomic(f"atomic {name}"))
    process = runjobs("--topics", "worker.Fork,worker.ForkAsync,worker.ForkAtomic")
    wait_until(lambda: not Job.objects.exists(), because="all is done", within=20)

    begun = sorted(line.name for line in ledger.lines("begin"))
    assert begun == sorted([*names, *(f"async {name}" for name in names)])
    assert Note.objects.count() == 40
    wait_until(lambda: not living_children(process.pid), because="no copy of the worker is left")
    process.send(signal.SIGTERM)
    assert process.wait(within=10) == 0
    assert "cannot reach the database" not in process.log()
