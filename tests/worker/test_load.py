"""Many jobs, many workers, many threads."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from myxo_jobs import Jobs
from myxo_jobs.models import Job
from tests.rig import wait_until
from tests.worker.jobs import Query, Tiny

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


def test_each_of_thousands_of_jobs_starts_once_among_several_workers(runjobs, ledger):
    workers = [runjobs("--topics", "worker.Tiny") for _ in range(3)]
    wanted = [str(number) for number in range(3_000)]
    for start in range(0, len(wanted), 500):  # while the workers take them
        jobs.put_many(Tiny(name) for name in wanted[start : start + 500])
    wait_until(lambda: not Job.objects.exists(), because="the table ends empty", within=60)

    starts = ledger.lines("begin")
    assert Counter(line.name for line in starts) == Counter(wanted)
    assert {line.attempt for line in starts} == {1}
    assert len({line.pid for line in starts}) == 3
    for process in workers:
        process.send(2)
        assert process.wait(within=10) == 0
        assert "Traceback" not in process.log()
        assert not any(level in process.log() for level in ("WARNING", "ERROR"))


def test_memory_does_not_grow_with_the_jobs_though_debug_is_on(runjobs, ledger):
    # Django keeps the queries of a DEBUG project, 9,000 of each connection.
    warm, last = 2_000, 20_000
    jobs.put_many(Query(number) for number in range(last + 1))
    process = runjobs("--topics", "worker.Query", settings={"DEBUG": True})
    wait_until(lambda: not Job.objects.exists(), because="all are done", within=60)
    assert process.exit_code is None

    peaks = {int(line.name): line.value for line in ledger.lines("peak")}
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    assert (peaks[last] - peaks[warm]) * unit < 20 * 1024 * 1024
