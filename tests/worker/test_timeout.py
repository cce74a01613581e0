"""A run that takes longer than its `timeout` is a failed attempt, whatever it does."""

from __future__ import annotations

import random
import signal
import threading
import time

import msgspec
import pytest

from myxo_jobs import Jobs, JobTimeout, job
from myxo_jobs.models import Job
from myxo_jobs.queue import Claim
from myxo_jobs.worker.limits import TimeLimits
from tests.app.models import Note
from tests.rig import handler_of, make_job, wait_until
from tests.worker.jobs import Hang, HangAsync, HangAtomic, Slow, Steady

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()

TIMEOUT, BACKOFF, GRACE = 0.5, 0.25, 0.5


def has_failed(job_id: int | None, attempts: int) -> bool:
    return Job.objects.filter(pk=job_id, attempts=attempts).exclude(error="").exists()


def is_gone(job_id: int | None) -> bool:
    return not Job.objects.filter(pk=job_id).exists()


# -- plain handlers -----------------------------------------------------------


@pytest.mark.parametrize("how", ["loop", "swallow"])
def test_a_handler_that_takes_too_long_is_interrupted_and_its_worker_starts_afresh(
    runjobs, ledger, how
):
    process = runjobs("--topics", "worker.Hang")
    job_id = jobs.put(Hang(how))
    wait_until(lambda: has_failed(job_id, 1), because="the attempt has failed", within=5)
    row = Job.objects.get(pk=job_id)
    assert row.error == "JobTimeout: it took longer than 0.5 s"
    assert row.failed is False

    wait_until(lambda: is_gone(job_id), because="the second attempt is done", within=10)
    first, second = ledger.lines("begin")
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.at - first.at >= TIMEOUT + BACKOFF
    # The same process, which has begun anew.
    assert (process.pid, process.exit_code) == (second.pid, None)
    assert process.log().count(" started using=") == 2
    assert process.log().count("timed out after 0.5s") == 1


def test_a_handler_that_always_takes_too_long_fails_after_its_attempts(runjobs, ledger):
    runjobs("--topics", "worker.Hang")
    job_id = jobs.put(Hang("loop", runs=9))
    wait_until(lambda: Job.objects.filter(failed=True), because="it has failed", within=15)
    row = Job.objects.get(pk=job_id)
    assert (row.attempts, ledger.count("begin"), ledger.count("end")) == (2, 2, 0)
    assert row.error == "JobTimeout: it took longer than 0.5 s"
    assert "in loop" in row.traceback


def test_beside_an_interrupted_handler_others_finish_within_the_grace_and_none_starts(
    runjobs, ledger
):
    process = runjobs("--topics", "worker.Hang,worker.Slow", "--workers", "2")
    jobs.put(Slow("beside", seconds=1.5))
    jobs.put(Hang("loop"))
    wait_until(lambda: ledger.count("begin") == 2, because="both run")
    process.wait_for_log("timed out after")
    jobs.put(Slow("after"))

    wait_until(lambda: not Job.objects.exists(), because="all is done", within=15)
    (end,) = ledger.lines("end", name="beside")
    assert end.attempt == 1
    assert min(line.at for line in ledger.lines("begin", name="after")) > end.at
    assert [line.attempt for line in ledger.lines("begin", name="loop")] == [1, 2]


def test_beside_an_interrupted_handler_what_outlasts_the_grace_is_given_back(runjobs, ledger):
    runjobs("--topics", "worker.Hang,worker.Steady", "--grace", "0.5")
    jobs.put(Steady("long", seconds=60.0))
    jobs.put(Hang("loop"))
    wait_until(lambda: ledger.count("begin", name="long") == 2, because="it runs anew", within=10)
    assert [line.attempt for line in ledger.lines("begin", name="long")] == [1, 1]


def test_a_handler_that_cannot_be_interrupted_ends_with_its_process_which_starts_afresh(
    runjobs, ledger
):
    process = runjobs("--topics", "worker.Hang", "--grace", "0.5")
    ids = [jobs.put(Hang("sleep")), jobs.put(Hang("deaf"))]
    wait_until(lambda: all(has_failed(i, 1) for i in ids), because="they have failed", within=30)
    for row in Job.objects.all():
        assert row.error.startswith("JobTimeout: it took longer than its timeout, and could not")
    wait_until(lambda: not Job.objects.exists(), because="all is done", within=30)
    begins = ledger.lines("begin")
    assert sorted(line.attempt for line in begins) == [1, 1, 2, 2]
    assert {line.pid for line in begins} == {process.pid}
    assert min(line.at for line in begins if line.attempt == 2) - begins[0].at < TIMEOUT + GRACE + 6


def test_a_process_that_c_code_keeps_from_ending_is_gone_within_the_grace(runjobs, ledger):
    process = runjobs("--topics", "worker.Hang", "--grace", "0.5")
    job_id = jobs.put(Hang("sleep in C"))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    assert process.wait(within=TIMEOUT + GRACE + 2.0) == 1
    assert "in sleep_in_c" in process.log()
    assert Job.objects.get(pk=job_id).attempts == 1

    runjobs("--topics", "worker.Hang")
    wait_until(lambda: is_gone(job_id), because="it runs again after its lease", within=30)
    assert [line.attempt for line in ledger.lines("begin")] == [1, 2]


def test_an_atomic_handler_that_takes_too_long_is_rolled_back(runjobs, ledger):
    runjobs("--topics", "worker.HangAtomic")
    for how in ("loop", "swallow"):
        job_id = jobs.put(HangAtomic(how, how))
        wait_until(lambda: is_gone(job_id), because="the second attempt is done", within=10)  # noqa: B023
    texts = Note.objects.order_by("pk").values_list("text", flat=True)
    assert list(texts) == ["loop 2", "swallow 2"]


def test_a_worker_that_is_told_to_stop_while_a_run_times_out_still_exits_0(runjobs, ledger):
    process = runjobs("--topics", "worker.Hang", "--grace", "0.5")
    jobs.put(Hang("sleep"))
    process.wait_for_log("timed out after")
    process.send(signal.SIGTERM)
    assert process.wait(within=4) == 0
    assert Job.objects.get().attempts == 1  # it has had its run


# -- under a supervisor -------------------------------------------------------


@pytest.mark.parametrize("how", ["loop", "sleep", "sleep in C"])
def test_a_process_with_a_run_that_took_too_long_is_replaced(runjobs, ledger, how):
    supervisor = runjobs("--topics", "worker.Hang", "--processes", "1", "--grace", "0.5")
    job_id = jobs.put(Hang(how))
    wait_until(lambda: has_failed(job_id, 1), because="the attempt has failed", within=10)
    assert Job.objects.get(pk=job_id).error.startswith("JobTimeout: it took longer than")
    wait_until(lambda: is_gone(job_id), because="the second attempt is done", within=10)
    first, second = ledger.lines("begin")
    assert (first.attempt, second.attempt) == (1, 2)
    assert TIMEOUT + BACKOFF <= second.at - first.at < TIMEOUT + GRACE + 6
    assert supervisor.pid not in (first.pid, second.pid)
    assert first.pid != second.pid


def test_a_killed_process_of_an_overdue_run_takes_no_attempt_of_its_other_jobs(runjobs, ledger):
    topics = "worker.Hang,worker.Steady"
    runjobs("--topics", topics, "--processes", "1", "--grace", "0.5")
    jobs.put(Steady("long", seconds=60.0))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    jobs.put(Hang("sleep in C"))
    wait_until(lambda: ledger.count("begin", name="long") == 2, because="it runs anew", within=12)
    assert [line.attempt for line in ledger.lines("begin", name="long")] == [1, 1]
    wait_until(lambda: ledger.count("end", name="sleep in C"), because="it is done", within=5)
    assert [line.attempt for line in ledger.lines("begin", name="sleep in C")] == [1, 2]


# -- async handlers -----------------------------------------------------------


def test_an_async_handler_that_takes_too_long_is_cancelled_and_its_worker_goes_on(runjobs, ledger):
    process = runjobs("--topics", "worker.HangAsync")
    ids = [jobs.put(HangAsync("await")), jobs.put(HangAsync("swallow"))]
    wait_until(lambda: all(has_failed(i, 1) for i in ids), because="they have failed", within=5)
    assert {row.error for row in Job.objects.all()} == {"JobTimeout: it took longer than 0.5 s"}
    wait_until(lambda: not Job.objects.exists(), because="all is done", within=5)
    assert sorted(line.attempt for line in ledger.lines("begin")) == [1, 1, 2, 2]
    assert process.log().count(" started using=") == 1


@pytest.mark.parametrize("how", ["deaf", "block"])
def test_an_async_handler_that_cannot_be_cancelled_ends_with_its_process(runjobs, ledger, how):
    process = runjobs("--topics", "worker.HangAsync", "--grace", "0.5")
    job_id = jobs.put(HangAsync(how))
    wait_until(lambda: has_failed(job_id, 1), because="the attempt has failed", within=30)
    assert Job.objects.get(pk=job_id).error.startswith("JobTimeout: it took longer than")
    wait_until(lambda: is_gone(job_id), because="the second attempt is done", within=30)
    assert [(line.attempt, line.pid) for line in ledger.lines("begin")] == [
        (1, process.pid),
        (2, process.pid),
    ]
    assert process.log().count(" started using=") == 2


# -- the interruption itself --------------------------------------------------


class Task(msgspec.Struct, frozen=True):
    name: str = ""


@pytest.mark.parametrize("seed", [1, 2])
def test_an_interruption_meets_its_own_run_and_never_what_comes_after_it(seed):
    """A seeded history of runs that end about when their time is over."""
    chance = random.Random(seed)
    told: list[Claim] = []

    def wear_out(claim: Claim) -> None:
        told.append(claim)
        time.sleep(0.001)  # the run may end before it is interrupted

    limits = TimeLimits(wear_out, lambda claim: None, grace=60, watchdog=False)
    counts = {"done": 0, "timed out": 0}
    faults: list[BaseException] = []

    def spin(seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    def run_them() -> None:
        try:
            for _ in range(200):
                seconds = chance.uniform(0.001, 0.012)
                handler = handler_of("t.Task", timeout=0.002, function=spin)
                claim = Claim(1, "t.1", handler, "{}", None, 1, None, False, 0.0)
                try:
                    limits.call(claim, [seconds])
                    counts["done"] += 1
                    was_struck = False
                except JobTimeout:
                    counts["timed out"] += 1
                    was_struck = True
                assert (claim in told) is was_struck
                spin(0.0005)  # what comes after it
        except BaseException as fault:  # asserted below
            faults.append(fault)

    thread = threading.Thread(target=run_them)
    thread.start()
    thread.join(30)
    limits.stop()
    assert faults == []
    assert sum(counts.values()) == 200
    assert min(counts.values()) > 10, counts


def test_nothing_starts_in_a_process_whose_handler_was_interrupted(worker):
    """Not even what was claimed already."""
    started: list[str] = []

    @job(Task, topic="t.Task", timeout=0.5, attempts=2, backoff=60)
    def handle(request: Task) -> None:
        started.append(request.name)
        while request.name == "loops":
            pass

    for _ in range(30):  # quick ones, so that many are claimed ahead
        make_job("t.Task", payload='{"name":"quick"}')
    make_job("t.Task", payload='{"name":"loops"}')
    for _ in range(30):
        make_job("t.Task", payload='{"name":"after"}')
    running = worker(topics=["t.Task"])
    assert wait_until(lambda: running.join(0.1), because="the worker ends by itself")
    assert running.worn
    assert started.count("loops") == 1
    assert "after" not in started
    rows = Job.objects.filter(payload__contains="after")
    assert {(row.status, row.attempts) for row in rows} == {("pending", 0)}
