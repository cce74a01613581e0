"""`limit`: never more of a topic's jobs at once, over all workers."""

from __future__ import annotations

import signal
import time
from itertools import accumulate
from typing import Any

import pytest
from django.db import connection

from myxo_jobs import Jobs, queue
from myxo_jobs.models import Job
from tests.rig import claim_some, handler_of, in_threads, make_job, wait_until
from tests.worker.jobs import Limited

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


def claim(limit: int = 2, count: int = 5) -> int:
    """Claim jobs of t.Limited as a worker would; return how many it got."""
    handler = handler_of("t.Limited", limit=limit)
    try:
        return len(queue.claim(connection, handler, count, token=queue.Tokens().next()))
    except queue.LimitReached:
        return 0


def test_a_claim_takes_what_the_limit_has_room_for():
    for _ in range(5):
        make_job("t.Limited")
    make_job("t.Limited", status="failed")
    make_job("t.Limited", status="done")

    assert [claim(count=1), claim(), claim(), claim(limit=3)] == [1, 1, 0, 1]


def test_a_claim_whose_lease_is_over_has_left_the_limit(wind_back):
    for _ in range(3):
        make_job("t.Limited")
    assert claim() == 2
    wind_back(Job.objects.filter(status="running").first(), seconds=31)

    assert claim() == 1


def test_claims_at_once_never_take_more_than_the_limit_together():
    for _ in range(100):
        make_job("t.Limited")
    for _ in range(10):
        assert sum(in_threads(*[lambda: claim(count=2)] * 6)) == 2
        Job.objects.filter(status="running").delete()


def test_three_processes_never_run_more_than_the_limit_and_use_all_of_it(runjobs, ledger):
    for number in range(24):
        jobs.put(Limited(str(number), 0.25))
    workers = [runjobs("--topics", "worker.Limited") for _ in range(3)]
    wait_until(lambda: ledger.count("begin") >= 6, because="they run")
    workers[0].kill()
    wait_until(lambda: not Job.objects.exists(), because="all are done", within=40)
    for one in workers[1:]:
        one.send(signal.SIGTERM)
        assert one.wait() == 0

    runs = {(line.pid, line.job): line.at for line in ledger.lines("begin")}
    # The runs that were killed have no end, and end with their process.
    steps = [(line.at, -1) for line in ledger.lines("end")]
    steps += [(runs[line.pid, line.job], 1) for line in ledger.lines("end")]
    running = list(accumulate(step for _, step in sorted(steps)))
    assert max(running) == 2
    assert len({line.name for line in ledger.lines("end")}) == 24


def test_a_worker_that_meets_the_limit_waits_before_it_asks_again(worker, monkeypatch):
    asked: list[float] = []
    original = queue.claim

    def counted(*arguments: Any, **options: Any) -> list[queue.Claim]:
        asked.append(time.monotonic())
        return original(*arguments, **options)

    for _ in range(4):
        make_job("worker.Limited", payload='{"name":"a"}')
    claim_some("worker.Limited", 2)
    monkeypatch.setattr(queue, "claim", counted)
    worker(topics=["worker.Limited"])
    time.sleep(2.5)

    assert 2 <= len(asked) <= 8
    assert Job.objects.filter(status="pending").count() == 2
