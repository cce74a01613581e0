"""The task of the peers that are backends of django.tasks."""

from __future__ import annotations

from django.tasks import task

from tests.benchmarks.evidence import write_down


@task()
def noop(number: int) -> None:
    write_down(number)
