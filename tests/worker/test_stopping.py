"""Signals: a worker that is told to stop leaves nothing half-claimed."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import msgspec
import pytest
from django.core.management import call_command

from myxo_jobs import Jobs, job
from myxo_jobs.models import Job
from myxo_jobs.testing import Worker
from tests.rig import wait_until
from tests.worker.jobs import Mute, Patient, Slow

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


@pytest.fixture(autouse=True)
def hang_ups_count():
    """Let no process of a test ignore SIGHUP, as under nohup: a function is not inherited."""
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    yield
    signal.signal(signal.SIGHUP, before)


class Task(msgspec.Struct, frozen=True):
    name: str = ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_worker_that_is_told_to_stop_finishes_what_runs_and_starts_nothing_else(
    runjobs, ledger, number
):
    process = runjobs("--topics", "worker.Slow")
    jobs.put(Slow("runs", seconds=1.5))
    wait_until(lambda: ledger.count("begin", name="runs") == 1, because="it runs")
    for place in range(3):
        jobs.put(Slow(f"waits {place}"))
    dues = list(Job.objects.order_by("id").values_list("id", "due"))
    process.send(number)

    assert process.wait(within=10) == 0
    assert [line.name for line in ledger.lines("begin")] == ["runs"]
    assert ledger.count("end", name="runs") == 1
    rows = Job.objects.order_by("id")
    assert [(row.status, row.attempts, row.worker) for row in rows] == [("pending", 0, "")] * 3
    assert list(rows.values_list("id", "due")) == dues[1:]

    runjobs("--topics", "worker.Slow", "--drain")
    wait_until(lambda: not Job.objects.exists(), because="others get them at once", within=5)


@pytest.mark.parametrize("options", [(), ("--processes", "1")], ids=["alone", "supervised"])
def test_a_hang_up_beside_another_signal_does_not_cut_the_drain_short(runjobs, ledger, options):
    process = runjobs("--topics", "worker.Slow", *options)
    jobs.put(Slow("runs", seconds=1.5))
    wait_until(lambda: ledger.count("begin", name="runs") == 1, because="it runs")
    process.send(signal.SIGHUP)
    time.sleep(0.2)
    process.send(signal.SIGHUP)

    assert process.wait(within=10) == 0
    assert ledger.count("end", name="runs") == 1


def test_a_worker_under_nohup_outlives_its_terminal(runjobs, ledger):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = runjobs("--topics", "worker.Slow")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send(signal.SIGHUP)
    time.sleep(0.5)
    jobs.put(Slow("later"))
    wait_until(lambda: ledger.count("end", name="later") == 1, because="it still works")


def test_an_idle_worker_is_gone_soon_after_it_is_told_to_stop(runjobs):
    process = runjobs()
    time.sleep(0.5)
    process.send(signal.SIGTERM)
    assert process.wait(within=2.0) == 0


def test_a_claim_is_kept_while_its_worker_drains_longer_than_the_lease(runjobs, ledger):
    process = runjobs("--topics", "worker.Slow", "--grace", "30")
    jobs.put(Slow("long", seconds=6.0))  # three leases
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    process.send(signal.SIGTERM)
    runjobs("--topics", "worker.Slow")

    assert process.wait(within=20) == 0
    assert (ledger.count("begin"), ledger.count("end")) == (1, 1)
    assert not Job.objects.exists()


def test_a_job_that_does_not_end_within_the_grace_is_given_back_with_no_attempt_used(
    runjobs, ledger
):
    process = runjobs("--topics", "worker.Slow", "--grace", "0.5")
    job_id = jobs.put(Slow("endless", seconds=60.0))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    due = Job.objects.get(pk=job_id).due
    process.send(signal.SIGTERM)

    assert process.wait(within=5) == 0
    row = Job.objects.get(pk=job_id)
    assert (row.status, row.attempts, row.worker, row.due) == ("pending", 0, "", due)


def test_a_second_signal_ends_a_worker_whose_handler_blocks_and_the_job_runs_again(runjobs, ledger):
    process = runjobs("--topics", "worker.Slow")
    job_id = jobs.put(Slow("blocks", seconds=60.0))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    process.send(signal.SIGINT)
    time.sleep(0.5)
    assert process.exit_code is None
    process.send(signal.SIGINT)

    process.wait(within=3.0)
    row = Job.objects.get(pk=job_id)
    assert (row.status, row.failed, row.attempts) == ("running", False, 1)

    runjobs("--topics", "worker.Slow")
    wait_until(lambda: ledger.count("begin") == 2, because="it runs again", within=2.0 + 5.0)
    assert ledger.lines("begin")[1].attempt == 2


def test_a_handler_that_stops_early_on_a_drain_is_given_back_with_no_attempt_used(runjobs, ledger):
    process = runjobs("--topics", "worker.Patient")
    job_id = jobs.put(Patient("patient"))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    due = Job.objects.get(pk=job_id).due
    process.send(signal.SIGTERM)

    assert process.wait(within=5) == 0
    row = Job.objects.get(pk=job_id)
    assert (row.status, row.attempts, row.worker, row.due) == ("pending", 0, "", due)


# -- without signals ----------------------------------------------------------


def test_a_worker_starts_and_stops_in_any_thread():
    started: list[str] = []
    seen: list[BaseException | None] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        started.append(request.name)

    def run_a_worker() -> None:
        try:
            with Worker(topics=["t.Task"]):
                wait_until(lambda: started, because="it works")
            seen.append(None)
        except BaseException as error:  # asserted below
            seen.append(error)

    jobs.put(Task("in a thread"))
    thread = threading.Thread(target=run_a_worker)
    thread.start()
    thread.join(15)
    assert (seen, started) == ([None], ["in a thread"])
    assert not Job.objects.exists()


def test_the_command_runs_outside_the_main_thread(ledger):
    """As below a reloader, which owns the main thread: nothing is said about signals."""
    before = signal.getsignal(signal.SIGTERM)
    seen: list[BaseException | None] = []

    def run_the_command() -> None:
        try:
            call_command("runjobs", "--drain", "--topics", "worker.Slow")
            seen.append(None)
        except BaseException as error:  # asserted below
            seen.append(error)

    jobs.put(Slow("in a thread"))
    thread = threading.Thread(target=run_the_command)
    thread.start()
    thread.join(15)
    assert seen == [None]
    assert ledger.count("end") == 1
    assert not Job.objects.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_stopping_a_worker_in_process_waits_for_its_jobs():
    runs, let_go = threading.Event(), threading.Event()
    ended: list[str] = []

    @job(Task, topic="t.Task")
    def handle(request: Task) -> None:
        runs.set()
        let_go.wait(30)
        ended.append(request.name)

    jobs.put(Task("runs"))
    jobs.put(Task("waits"))
    running = Worker(topics=["t.Task"])
    running.start()
    wait_until(runs.is_set, because="it runs")
    running.request_stop()
    assert not running.join(0.3)
    let_go.set()
    assert wait_until(lambda: running.join(0.1), because="it ends with its job")
    assert ended == ["runs"]
    assert [(row.status, row.attempts) for row in Job.objects.all()] == [("pending", 0)]


def test_a_worker_whose_handler_closed_its_output_leaves_at_the_second_signal(runjobs, ledger):
    process = runjobs("--topics", "worker.Mute")
    jobs.put(Mute("held", seconds=60))
    wait_until(lambda: ledger.count("begin", name="held") == 1, because="it runs")
    process.send(signal.SIGTERM)
    process.wait_for_log(" drains ")
    process.send(signal.SIGTERM)
    assert process.wait(within=3) == 128 + signal.SIGTERM


def test_a_signal_to_stop_inside_another_one_does_not_hang():
    worker = Worker(["worker.Tiny"])

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is threading.Event.set.__code__:
            return at_each_line
        return None

    def at_each_line(frame: FrameType, event: str, _: object) -> Any:
        if "notify_all" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            worker.request_stop()  # as a second signal's handler does
        return at_each_line

    def stop() -> None:
        sys.settrace(interrupt)
        worker.request_stop()

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    stopping.join(5)
    assert not stopping.is_alive()
    assert worker.was_stopped
