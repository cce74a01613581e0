"""The services that the tests run in real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from myxo_jobs.services import JobService, register
from myxo_jobs.services.rows import ServiceJob
from tests import ledger


class Deadly(msgspec.Struct, frozen=True):
    """Leave large working files and kill the process, so many times."""

    name: str
    kills: int


@register
class DeadlyService(JobService):
    kind = "deadly"
    payload_type = Deadly
    attempts = 3
    lease = 10.0  # a supervisor ends it sooner
    backoff = 0.1

    def process(self, job: ServiceJob) -> dict[str, Any]:
        request = job.payload
        ledger.write("begin", name=request.name, job=job.pk, attempt=job.attempt)
        with job.file("working.bin") as f:
            f.write(b"x" * 1_000_000)
        if job.attempt <= request.kills:
            with job.file("half.bin") as half:
                half.write(b"y" * 1_000_000)
                half.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        with job.file("good.txt", text=True) as good:
            good.write("good")
        return {"file": good.name}

    def cleanup(self, job: ServiceJob) -> None:
        ledger.write("cleanup", name=str(job.uid), job=job.pk)


@register
class Patient(JobService):
    """Leaves a working file, and waits until the file that its payload names is there."""

    kind = "patient"
    backoff = 0.1

    def process(self, job: ServiceJob) -> dict[str, Any]:
        with job.file("working.bin") as f:
            f.write(b"x")
        ledger.write("begin", name="patient", job=job.pk, attempt=job.attempt)
        while not Path(job.payload).exists():
            time.sleep(0.05)
        with job.file("good.txt", text=True) as good:
            good.write("good")
        return {"file": good.name}
