"""What services put: a job with its uid, its owner, and one at a time of a key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from myxo_jobs import Jobs, queue
from myxo_jobs.databases import KeptColumns, Row
from myxo_jobs.models import Job
from tests.rig import in_threads, make_job

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


def enqueue(key: str | None = None, owner: str = "1", topic: str = "t.Keep", **more: Any) -> str:
    kept = KeptColumns(
        uid=str(queue.uuid7()),
        owner_kind="auth.user",
        owner_id=owner,
        preferred_name="notes – Räksmörgås.csv",
        language="pt-br",
        time_zone="America/Sao_Paulo",
    )
    return queue.enqueue(connection, Row(topic, '{"a":1}', key, 5), kept, due=more.get("due"))


def test_the_row_is_a_waiting_job_with_what_was_told():
    uid = enqueue("one")

    row = Job.objects.get(uid=uid)
    assert (row.status, row.topic, row.payload, row.key, row.priority) == (
        "pending",
        "t.Keep",
        '{"a":1}',
        "one",
        5,
    )
    assert (row.owner_kind, row.owner_id) == ("auth.user", "1")
    assert row.preferred_name == "notes – Räksmörgås.csv"
    assert (row.language, row.time_zone) == ("pt-br", "America/Sao_Paulo")


def test_it_is_due_after_a_delay_or_at_a_moment():
    rows = [Job.objects.get(uid=enqueue(due=due)) for due in (None, 60.0)]
    moment = rows[0].created_at + timedelta(days=1)
    rows.append(Job.objects.get(uid=enqueue(due=moment)))

    waits = [(row.due - row.created_at).total_seconds() for row in rows]
    assert abs(waits[0]) < 1
    assert 59 < waits[1] < 61
    assert abs(rows[2].due - moment) < timedelta(milliseconds=2)


def test_a_claim_leaves_the_uid_that_was_given(claim_some):
    from tests.rig import handler_of

    uid = enqueue()
    handler = handler_of("t.Keep", keep=60.0)
    (claim,) = queue.claim(connection, handler, 1, token=queue.Tokens().next())

    assert claim.uid == uid
    assert str(Job.objects.get().uid) == uid


def test_a_rolled_back_one_leaves_no_job():
    with transaction.atomic():
        enqueue()
        transaction.set_rollback(True)

    assert not Job.objects.exists()


@pytest.mark.parametrize("status", ["pending", "running"])
def test_while_one_of_the_key_waits_or_runs_its_uid_is_returned(status):
    first = enqueue("one")
    if status == "running":
        Job.objects.update(worker="w.1")
    with transaction.atomic():
        assert enqueue("one") == first
        assert Job.objects.count() == 1  # the transaction stays usable


@pytest.mark.parametrize("status", ["done", "failed"])
def test_once_it_has_ended_the_next_one_is_put(status):
    first = enqueue("one")
    if status == "done":
        Job.objects.update(due=None)
    else:
        Job.objects.update(failed=True)  # by SQL, so that it still has the key
    second = enqueue("one")

    assert second != first
    assert Job.objects.get(uid=second).key == "one"
    assert Job.objects.count() == 2


def test_without_a_key_each_is_put():
    assert enqueue() != enqueue()


def test_another_owners_job_is_not_told_of_by_a_key_that_was_made_by_hand():
    first = enqueue("one", owner="1")
    second = enqueue("one", owner="2")

    assert first != second
    assert Job.objects.get(uid=second).key is None


def test_a_job_put_by_sql_under_the_key_gets_a_uid():
    row = make_job("t.Keep", key="one", owner_kind="auth.user", owner_id="1")
    uid = enqueue("one")

    row.refresh_from_db()
    assert str(row.uid) == uid
    assert Job.objects.count() == 1


def test_ten_at_once_of_one_key_put_one_job():
    uids = in_threads(*[lambda: enqueue("one")] * 10)

    assert len(set(uids)) == 1
    assert Job.objects.count() == 1
