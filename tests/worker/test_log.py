"""A log that nobody reads stops no worker, and nothing in it does more than be read."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import signal
import subprocess
import sys

import pytest

from myxo_jobs import Jobs
from myxo_jobs.models import Job
from tests.rig import process_environment, wait_until
from tests.worker.jobs import Fail, Tiny

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


def test_a_worker_goes_on_beside_a_full_pipe_and_tells_later_what_was_lost(ledger):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "django", "runjobs", "--topics", "worker.Fail,worker.Tiny"],
        env=process_environment(settings={"LOGGING": {}}),
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    try:
        for number in range(50):
            jobs.put(Fail(f"{number}"))
        jobs.put(Tiny("beside them"))
        wait_until(lambda: ledger.count("begin", name="beside them"), because="work goes on")
        wait_until(
            lambda: Job.objects.filter(topic="worker.Fail", failed=True).count() == 50,
            because="every failure is stored",
            within=30,
        )
        os.set_blocking(reading, False)
        told = os.read(reading, 2**20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        told += os.read(reading, 2**20)
    finally:
        process.kill()
        process.wait()
        os.close(reading)

    assert b" lines of the log are lost: nobody read it\n" in told
    assert b" drains " in told


@pytest.fixture
def log():
    """What the logger of the package writes, as a project's own handler would have it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("myxo_jobs").addHandler(handler)
    yield stream.getvalue
    logging.getLogger("myxo_jobs").removeHandler(handler)


ACTING = "\x1b]0;owned\x07 \x9b2J \r\u202e \u2028 done\0"


def test_what_a_job_raises_cannot_act_on_the_terminal_that_shows_the_log(worker, ledger, log):
    job_id = jobs.put(Fail(ACTING))
    worker(topics=["worker.Fail"])
    wait_until(lambda: Job.objects.get(pk=job_id).failed, because="its error is stored")
    wait_until(lambda: "Traceback" in log(), because="its error is told")

    assert "Fail" in log()
    assert "\\x1b]0;owned\\x07" in log()
    told = set(log()) - set("\n")
    assert all(one.isprintable() or one == "\t" for one in told), sorted(told)


def test_a_log_line_is_one_line_whatever_it_tells(log):
    logging.getLogger("myxo_jobs").error("cannot be done: %s", ValueError("one\njob=1 \ud83d"))

    assert log() == "cannot be done: one\\njob=1 \\ud83d\n"


def test_no_line_of_a_traceback_passes_for_another_event(log):
    try:
        raise ValueError("no\n2026-01-01 00:00:00,000 ERROR job=1 failed")
    except ValueError:
        logging.getLogger("myxo_jobs").exception("failed")

    first, *trace = log().splitlines()
    assert first == "failed"
    assert all(line.startswith("  ") for line in trace)


def test_a_huge_error_makes_no_huge_log(log):
    try:
        raise ValueError("x" * 10_000_000)
    except ValueError:
        logging.getLogger("myxo_jobs").exception("failed")

    assert log().startswith("failed\n  Traceback (most recent call last):\n")
    assert len(log().encode()) <= 16 * 1024 + 1_000
