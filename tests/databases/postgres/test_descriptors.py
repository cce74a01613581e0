"""A process that has no file descriptor left."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import OperationalError

from myxo_jobs.databases import database_of

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    lowest = os.dup(0)
    os.close(lowest)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@pytest.mark.parametrize("count", [0, 1])
def test_a_worker_that_has_no_descriptor_left_meets_an_outage(count):
    with descriptors_left(count), pytest.raises(OperationalError):
        database_of("default").open("default")
