"""--max-jobs and --max-rss: a fresh process takes over between jobs, at no job's cost."""

from __future__ import annotations

import signal
import time

import pytest

from myxo_jobs import Jobs
from myxo_jobs.models import Job
from tests.rig import wait_until
from tests.worker.jobs import Grow, Slow, Steady, Tiny

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


def all_done(within: float = 20.0) -> None:
    wait_until(lambda: not Job.objects.exists(), because="all is done", within=within)


def test_a_worker_starts_afresh_after_so_many_jobs(runjobs, ledger):
    jobs.put_many(Tiny(str(number)) for number in range(12))
    process = runjobs("--topics", "worker.Tiny", "--max-jobs", "5")
    all_done()
    begins = ledger.lines("begin")
    assert len({line.name for line in begins}) == len(begins) == 12
    assert {(line.attempt, line.pid) for line in begins} == {(1, process.pid)}
    assert process.log().count("is worn: 5 jobs have ended (--max-jobs)") == 2
    assert process.log().count(" started using=") == 3
    assert "given back" not in process.log()


def test_a_worker_process_is_replaced_after_so_many_jobs(runjobs, ledger):
    jobs.put_many(Tiny(str(number)) for number in range(14))
    supervisor = runjobs("--topics", "worker.Tiny", "--max-jobs", "3", "--processes", "2")
    all_done()
    begins = ledger.lines("begin")
    assert len({line.name for line in begins}) == len(begins) == 14
    assert {line.attempt for line in begins} == {1}
    pids = [line.pid for line in begins]
    assert max(pids.count(pid) for pid in pids) == 3
    assert supervisor.pid not in pids
    assert supervisor.exit_code is None


def test_a_job_that_runs_keeps_its_process_until_it_ends(runjobs, ledger):
    """And is not cut short: only a timeout has a grace."""
    options = ("--max-rss", "300", "--grace", "0.2", "--poll", "0.1")
    process = runjobs("--topics", "worker.Grow,worker.Steady", *options)
    jobs.put(Steady("long", seconds=2.5))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    jobs.put(Grow("large", mib=300))
    process.wait_for_log("is worn")
    assert ledger.count("end", name="long") == 0
    jobs.put(Grow("next", mib=0))
    all_done()
    assert [line.attempt for line in ledger.lines("begin", name="long")] == [1]
    assert ledger.count("end", name="long") == 1
    assert ledger.lines("begin", name="next")[0].at > ledger.lines("end")[0].at


@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["alone", "supervised"])
def test_a_drain_goes_on_in_the_fresh_process(runjobs, ledger, options):
    jobs.put_many(Tiny(str(number)) for number in range(7))
    process = runjobs("--topics", "worker.Tiny", "--max-jobs", "3", "--drain", *options)
    assert process.wait(within=20) == 0
    assert not Job.objects.exists()
    assert ledger.count("begin") == 7


def test_a_process_that_uses_too_much_memory_is_replaced(runjobs, ledger):
    for number in range(3):
        jobs.put(Grow(str(number), mib=400))
    process = runjobs("--topics", "worker.Grow", "--max-rss", "400", "--processes", "1")
    all_done()
    begins = ledger.lines("begin")
    assert [line.attempt for line in begins] == [1] * 3
    assert len({line.pid for line in begins}) >= 2
    assert "MiB of memory are used (--max-rss)" in process.log()


def test_a_process_that_is_too_large_from_its_start_still_does_a_job(runjobs, ledger):
    for number in range(3):
        jobs.put(Slow(str(number)))
    process = runjobs("--topics", "worker.Slow", "--max-rss", "1")
    all_done()
    assert process.log().count(" started using=") <= 4
    starts = process.log().count(" started using=")
    time.sleep(1.0)  # and then it waits for one
    assert process.log().count(" started using=") - starts <= 1
    assert process.exit_code is None


@pytest.mark.parametrize("moment", [0.0, 0.3])
def test_a_signal_that_falls_between_two_processes_is_heeded(runjobs, ledger, moment):
    process = runjobs("--topics", "worker.Slow", "--max-jobs", "1")
    jobs.put(Slow("one"))
    process.wait_for_log("is worn")
    time.sleep(moment)
    process.send(signal.SIGTERM)
    assert process.wait(within=5) == 0
