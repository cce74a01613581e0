"""The life of a job in the table, step by step."""

from __future__ import annotations

import pytest
from django.db import connection

from myxo_jobs import queue

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_job_whose_lease_is_over_is_claimed_again_and_its_first_claim_is_void(
    make_job, claim_one, wind_back
):
    make_job("receipts")
    first = claim_one("receipts", lease=30)
    wind_back(first, seconds=31)
    second = claim_one("receipts", lease=30)

    assert (second.job_id, second.attempt, second.suspect) == (first.job_id, 2, True)
    assert queue.complete(connection, [first]) == set()
    assert queue.complete(connection, [second]) == {second.job_id}
