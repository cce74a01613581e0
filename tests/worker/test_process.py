"""What the jobs of one process share: nobody finds it as another has left it."""

from __future__ import annotations

import os
import re
import resource
import signal

import pytest

from myxo_jobs import Jobs
from myxo_jobs.models import Job
from myxo_jobs.worker.process import Leftovers
from tests.rig import wait_until
from tests.worker.jobs import CHANGES, Child, Leave, Shared, SharedAsync

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


def all_done() -> None:
    wait_until(lambda: not Job.objects.exists(), because="all is done", within=20)


@pytest.mark.parametrize("options", [(), ("--processes", "1")], ids=["alone", "supervised"])
def test_a_job_finds_its_process_as_if_none_had_run_before_it(runjobs, ledger, options):
    process = runjobs("--topics", "worker.Shared,worker.SharedAsync", *options)
    jobs.put(Shared("at first"))
    all_done()
    for what in CHANGES:
        jobs.put(Shared("", what))
        jobs.put(Shared(what))
        all_done()
        jobs.put(SharedAsync("", what))
        all_done()
        jobs.put(Shared(f"{what}, async"))
        all_done()

    first, *others = ledger.lines("look")
    assert len(others) == 2 * len(CHANGES)
    assert [line for line in others if line.value != first.value] == []
    assert process.log().count("printed\n") == 1 + len(others)
    process.send(signal.SIGTERM)
    assert process.wait(within=10) == 0


def test_what_jobs_leave_behind_is_told_once(runjobs, ledger):
    process = runjobs("--topics", "worker.Leave,worker.Shared")
    jobs.put(Leave(60.0))
    jobs.put(Leave(60.0))
    process.wait_for_log(" have left behind: ", within=20)
    jobs.put(Leave(0.2))
    all_done()

    told = [line for line in process.log().splitlines() if "left behind" in line]
    assert len(told) == 1
    assert " WARNING worker=" in told[0]
    assert re.search(
        r" topics=worker\.Leave have left behind: process \d+ \(sleep\), process \d+ \(sleep\), "
        r"thread left …$",
        told[0],
    ), told[0]


def test_a_child_of_a_job_that_runs_is_not_left_behind(runjobs, ledger):
    process = runjobs("--topics", "worker.Child")
    jobs.put(Child("one", seconds=12.0))
    all_done()
    assert ledger.lines("end", name="one")
    assert "left behind" not in process.log()


def test_a_process_without_a_descriptor_left_is_not_looked_at():
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, usual[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir("/proc/self/task")  # noqa: PTH208
        Leftovers("name").look(list)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
