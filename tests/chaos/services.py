"""The services of the suite. Only workers that are told to know them.

Their payloads have a number, as the requests of `jobs` do; `may_fail` is for the checks.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import msgspec

from myxo_jobs import GiveUp
from myxo_jobs.services import JobService, register
from myxo_jobs.services.rows import ServiceJob
from tests.chaos import zoo
from tests.chaos.jobs import LEASE, recorded, write

MIB = 2**20


class Paper(msgspec.Struct, frozen=True):
    """Write a file for some seconds; the first run, and later ones, end as told."""

    number: int
    first: str  # "returns" or "raises"
    then: str
    first_seconds: float
    then_seconds: float
    may_fail: bool = False


@register
class Papers(JobService):
    """Leaves a mark of its run in whatever it may leave behind."""

    kind = "chaos-paper"
    payload_type = Paper
    lease = LEASE
    attempts = 100
    backoff = 0.05
    max_concurrent = 6

    def process(self, job: ServiceJob) -> dict[str, Any]:
        request, is_first = job.payload, job.attempt == 1
        mark = secrets.token_hex(8)
        with recorded(request.number, job.run):
            write("mark", str(request.number), job.run, mark)
            with job.file("paper.txt", text=True) as f:
                # Steps, since a stopped process sleeps on once it is continued.
                for step in range(10):
                    job.progress(step, 10, mark)
                    time.sleep((request.first_seconds if is_first else request.then_seconds) / 10)
                    f.write(mark)
            if is_first and request.first == "raises":
                raise ValueError(mark)
            if not is_first and request.then == "raises":
                raise GiveUp(mark)
        return {"mark": mark}


class Large(msgspec.Struct, frozen=True):
    """Write a file of so many MiB, none for 0."""

    number: int
    mib: int
    may_fail: bool = False


@register
class Larges(JobService):
    kind = "chaos-large"
    payload_type = Large
    lease = LEASE
    attempts = 2
    backoff = 0.05
    max_concurrent = 2

    def process(self, job: ServiceJob) -> dict[str, Any]:
        with recorded(job.payload.number, job.run):
            if job.payload.mib:
                with job.file("large.bin") as f:
                    for _ in range(job.payload.mib * 16):
                        f.write(os.urandom(MIB // 16))
        return {}


class Huge(msgspec.Struct, frozen=True):
    """Be of so many characters in one place."""

    number: int
    where: str
    size: int
    text: str = ""
    may_fail: bool = False


@register
class Huges(JobService):
    kind = "chaos-huge"
    payload_type = Huge
    lease = LEASE
    attempts = 3
    backoff = 0.05
    max_concurrent = 2

    def process(self, job: ServiceJob) -> Any:
        request = job.payload
        with recorded(request.number, job.run):
            if request.where == "note":
                job.progress(1e308, 1.7e308, "n" * request.size)
            if request.where == "number":
                job.progress(10**request.size)
            if request.where == "error":
                raise ValueError("e" * request.size)
            if request.where == "message":
                raise GiveUp("m" * request.size)
            return {"rows": "r" * request.size} if request.where == "result" else None


@register
class Noises(JobService):
    """Fails often, each time with the longest traceback, so that its attempt log is long."""

    kind = "chaos-noise"
    payload_type = Huge
    lease = LEASE
    attempts = 30
    backoff = 0.0

    def process(self, job: ServiceJob) -> None:
        with recorded(job.payload.number, job.run):
            zoo.ANIMALS["noise"]()


@register
class Beasts(JobService):
    """Says what it was told to, everywhere. Its payload is whatever JSON has."""

    kind = "chaos-beast"
    title = zoo.MARKUP
    lease = LEASE
    attempts = 1
    max_concurrent = 4

    def process(self, job: ServiceJob) -> dict[str, Any]:
        said, number = job.payload["said"], job.payload["number"]
        with recorded(number, job.run):
            job.progress(1, 2, said)
            if job.payload["end"] == "raises":
                raise ValueError(said)
            if job.payload["end"] == "gives up":
                raise GiveUp(said)
            while job.payload["end"] == "waits":
                job.progress(1, 2, said)
                time.sleep(0.05)
            with job.file(_own_name(job, said), text=True) as f:
                f.write(said)
        return {"said": said, "payload": job.payload, "file": f.name}


def _own_name(job: ServiceJob, said: str) -> str:
    """Return a text where it is taken for a file's name; what is refused is replaced."""
    try:
        job.file(said)
    except ValueError:
        return "beast.txt"
    return said
