"""A log that nobody reads stops no worker."""

from __future__ import annotations

import fcntl
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
