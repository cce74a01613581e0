"""The services that the tests run in real processes."""

from __future__ import annotations

import os
import signal
import time
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
    lease = 1.0
    backoff = 0.1

    def process(self, job: ServiceJob) -> dict[str, Any]:
        request: Any = job.payload
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


class Pair(msgspec.Struct, frozen=True):
    """Take some seconds; at most two at once."""

    name: str
    seconds: float = 0.0


@register
class PairService(JobService):
    kind = "pair"
    payload_type = Pair
    max_concurrent = 2
    lease = 2.0

    def process(self, job: ServiceJob) -> None:
        request: Any = job.payload
        ledger.write("begin", name=request.name, job=job.pk, attempt=job.attempt)
        time.sleep(request.seconds)
        ledger.write("end", name=request.name, job=job.pk, attempt=job.attempt)
