"""The life of a job in the table: claim, renew, complete, retry, fail, give back."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Callable
from datetime import timedelta

import msgspec
import pytest
from django.db import connection, transaction
from django.utils import timezone

from myxo_jobs import ClaimLost, Jobs, Run, job, queue
from myxo_jobs.databases import Floors, database_of
from myxo_jobs.models import Job, moment_of
from myxo_jobs.queue import Failure
from tests import rig
from tests.app.jobs import Work
from tests.rig import ago, handler_of, in_threads

jobs = Jobs()
pytestmark = pytest.mark.django_db(transaction=True)

ENDS = {
    "complete": lambda claim: queue.complete(connection, [claim]),
    "retry": lambda claim: queue.retry(
        connection, [Failure(claim, "ValueError: x", "trace", pause=8.0)]
    ),
    "fail": lambda claim: queue.fail(connection, [Failure(claim, "ValueError: x", "trace")]),
    "fail_unrun": lambda claim: queue.fail_unrun(
        connection, [Failure(claim, "ValueError: x", "trace")]
    ),
    "snooze": lambda claim: queue.snooze(connection, [(claim, 8.0)]),
    "give_back": lambda claim: queue.give_back(connection, [claim]),
    "renew": lambda claim: queue.renew(connection, [claim]),
}


def row(job: Job | queue.Claim | int) -> Job:
    pk = job if isinstance(job, int) else job.job_id if isinstance(job, queue.Claim) else job.pk
    return Job.objects.get(pk=pk)


def seconds_until(moment) -> float:
    return (moment - timezone.now()).total_seconds()


# -- claim -----------------------------------------------------------------------


def test_a_claim_takes_what_is_due_and_marks_it(make_job, claim_one):
    job = make_job("receipts", key="k", payload='{"a": 1}')
    claim = claim_one("receipts", lease=30)

    assert (claim.job_id, claim.payload, claim.key) == (job.pk, '{"a": 1}', "k")
    assert (claim.attempt, claim.suspect) == (1, False)
    after = row(job)
    assert (after.status, after.worker, after.attempts) == ("running", claim.token, 1)
    assert (after.due, after.created_at) == (job.due, job.created_at)
    assert 29 < seconds_until(after.lease_until) <= 30.01
    assert abs(seconds_until(after.started_at)) < 1


@pytest.fixture(params=["take", "skip"])
def claim_fresh(request) -> Callable[..., list[queue.Claim]]:
    """Claim jobs of which none is a suspect: with and without asking for suspects."""
    return functools.partial(rig.claim_some, on_suspect=request.param)


def test_a_claim_leaves_what_is_not_due_failed_done_running_or_of_another_topic(
    make_job, claim_fresh
):
    make_job("receipts", due=ago(-5))
    make_job("receipts", status="failed")
    make_job("receipts", due=None)
    make_job("receipts", status="running")
    make_job("receipt")

    assert claim_fresh("receipts") == []


def test_jobs_are_claimed_by_priority_then_due_then_id(make_job, claim_fresh):
    same = ago(50)
    line = [(100, 1), (5, 20), (5, 10), (0, 99), (0, 50), (0, 50), (-1, 1000), (-100, 2000)]
    rows = [
        make_job("receipts", priority=priority, due=same - timedelta(seconds=seconds))
        for priority, seconds in random.Random(7).sample(line, len(line))
    ]
    rows.sort(key=lambda row: (-row.priority, row.due, row.pk))

    assert [claim.job_id for claim in claim_fresh("receipts")] == [row.pk for row in rows]


def test_a_claim_takes_at_most_its_limit_and_the_next_goes_on_from_there(make_job, claim_fresh):
    ids = [make_job("receipts", priority=p, due=ago(50)).pk for p in (9, 9, 5, 5, 0, 0, 0)]

    taken = [[claim.job_id for claim in claim_fresh("receipts", 3)] for _ in range(4)]
    assert taken == [ids[:3], ids[3:6], ids[6:], []]


def test_delayed_jobs_of_a_higher_priority_hide_nothing(make_job, claim_fresh):
    for priority in (90, 50, 10):
        make_job("receipts", priority=priority, due=ago(-3600))
    low = make_job("receipts", priority=-100)

    assert [claim.job_id for claim in claim_fresh("receipts")] == [low.pk]


class Asked(msgspec.Struct, frozen=True):
    name: str


def test_a_claim_brings_what_its_handler_is_told(claim_fresh):
    @job(Asked, topic="t.Told")
    def handle(request: Asked, run: Run) -> None: ...

    with_key = Jobs().put(Asked("a"), key="a's")
    (claim,) = claim_fresh("t.Told")
    assert (claim.job_id, claim.key, claim.attempt) == (with_key, "a's", 1)
    assert seconds_until(moment_of(claim.created_at)) == pytest.approx(0, abs=5)
    assert not claim.cancelled

    assert queue.give_back(connection, [claim]) == {with_key}
    Job.objects.update(cancelled_at=ago(1))
    (again,) = claim_fresh("t.Told")
    assert (again.job_id, again.cancelled) == (with_key, True)


def test_of_claims_with_several_tokens_those_still_held_are_completed(make_job, claim_some):
    ids = [make_job("receipts", due=ago(100 - place)).pk for place in range(4)]
    claims = [*claim_some("receipts", 2), *claim_some("receipts", 2)]
    Job.objects.filter(pk=ids[1]).update(worker="another.1")
    Job.objects.filter(pk=ids[3]).update(again="{}")

    assert queue.complete(connection, claims) == {ids[0], ids[2]}
    assert set(Job.objects.values_list("pk", flat=True)) == {ids[1], ids[3]}


def test_an_expired_claim_is_claimed_again_at_its_old_place(make_job, claim_some):
    first = make_job("receipts", status="expired", due=ago(500))
    make_job("receipts", due=ago(10))

    claims = claim_some("receipts")
    assert [(claim.job_id, claim.suspect, claim.attempt) for claim in claims] == [
        (first.pk, True, 3)
    ]


def test_a_suspect_is_claimed_alone(make_job, claim_some):
    """What killed its worker once may do so again: nothing else is claimed beside it."""
    kinds = ["pending", "pending", "expired", "expired", "pending"]
    ids = [
        make_job("receipts", status=kind, due=ago(100 - place)).pk
        for place, kind in enumerate(kinds)
    ]

    taken = [[claim.job_id for claim in claim_some("receipts")] for _ in range(5)]
    assert taken == [ids[:2], ids[2:3], ids[3:4], ids[4:], []]


def test_a_suspect_of_a_lower_priority_waits_for_those_before_it(make_job, claim_some):
    suspect = make_job("receipts", status="expired", priority=-5, due=ago(5000))
    fresh = [make_job("receipts", priority=priority).pk for priority in (3, 0)]

    assert [claim.job_id for claim in claim_some("receipts")] == fresh
    assert [claim.job_id for claim in claim_some("receipts")] == [suspect.pk]


def test_suspects_are_passed_over_on_request(make_job, claim_some):
    make_job("receipts", status="expired", due=ago(500))
    fresh = make_job("receipts")

    assert [claim.job_id for claim in claim_some("receipts", on_suspect="skip")] == [fresh.pk]
    assert claim_some("receipts", on_suspect="skip") == []


def test_a_claim_can_stop_before_a_suspect(make_job, claim_some):
    first = make_job("receipts", due=ago(600))
    make_job("receipts", status="expired", due=ago(500))
    make_job("receipts")

    assert [claim.job_id for claim in claim_some("receipts", on_suspect="stop")] == [first.pk]
    assert claim_some("receipts", on_suspect="stop") == []


def test_a_claim_that_stops_before_suspects_takes_one_whose_worker_is_known_to_be_dead(
    make_job, claim_some
):
    job = make_job("receipts")
    make_job("receipts")
    (claim,) = claim_some("receipts", 1, lease=30)
    queue.expire(connection, [queue.Failure(claim, "WorkerLost: killed", "")])

    (again,) = claim_some("receipts", 5, on_suspect="stop")
    assert (again.job_id, again.suspect, again.attempt) == (job.pk, True, 2)
    assert queue.complete(connection, [claim]) == set()  # whatever its worker says yet


def test_a_claim_begins_where_the_one_before_found_its_first_job(make_job, claim_fresh):
    floors = Floors()
    ids = [make_job("receipts", due=ago(500 - place)).pk for place in range(3)]
    high = make_job("receipts", priority=7, due=ago(100)).pk

    def claim(limit: int) -> list[int]:
        claims = claim_fresh("receipts", limit, floors=floors)
        return [one.job_id for one in claims]

    assert claim(2) == [high, ids[0]]
    floors.full_at = math.inf
    assert claim(1) == [ids[1]]
    before_the_floor = make_job("receipts", due=ago(501)).pk
    of_a_new_priority = make_job("receipts", priority=3, due=ago(100)).pk
    later = [make_job("receipts", due=ago(1)).pk, make_job("receipts", priority=7).pk]
    assert claim(9) == [later[1], ids[2], later[0]]
    assert floors.in_doubt

    floors.full_at = 0.0
    assert claim(9) == [of_a_new_priority, before_the_floor]
    assert not floors.in_doubt


def test_a_look_from_the_floors_passes_by_what_stands_before_them(make_job, claim_some):
    floors = Floors()
    make_job("receipts", due=ago(500))
    claim_some("receipts", 1, floors=floors)
    floors.full_at = math.inf
    start = floors.at(0.0)
    look = functools.partial(database_of(connection).look, connection)

    make_job("receipts", due=ago(501))
    assert look({"receipts": start}, 10.0) == {}
    assert look({"receipts": None}, 10.0) == {"receipts": 0.0}
    make_job("receipts", due=ago(499))
    assert look({"receipts": start, "others": None}, 10.0) == {"receipts": 0.0}


def test_full_passes_take_a_tenth_of_the_time_but_come_every_two_seconds():
    floors = Floors()
    assert floors.at(0.0) is None
    floors.passed(None, [(0, "a"), (5, "b")], began=10.0, ended=10.05)
    assert floors.at(10.5) == [(5, "b"), (0, "a")]
    assert floors.at(10.6) is None
    floors.passed(None, [(0, "c")], began=20.0, ended=23.0)
    assert floors.at(24.9) == [(5, "b"), (0, "c")]
    assert floors.at(25.1) is None


def test_two_claims_never_share_a_job(make_job, claim_some):
    Job.objects.bulk_create(
        Job(topic="receipts", payload="{}", priority=number % 3, due=ago(5))
        for number in range(200)
    )

    def claim_all() -> list[int]:
        taken: list[int] = []
        while claims := claim_some("receipts", 7):
            taken += [claim.job_id for claim in claims]
        return taken

    taken = in_threads(*[claim_all] * 4)
    every = [job_id for part in taken for job_id in part]
    assert len(every) == len(set(every)) == 200
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}


def test_a_claim_inside_a_transaction_is_refused(make_job, claim_one):
    make_job("receipts")
    with transaction.atomic(), pytest.raises(RuntimeError, match="transaction"):
        claim_one("receipts")
    assert claim_one("receipts").attempt == 1


def test_tokens_never_repeat():
    tokens = [worker.next() for worker in (queue.Tokens(), queue.Tokens()) for _ in range(1000)]

    assert len(set(tokens)) == 2000
    assert max(map(len, tokens)) <= 40


def test_one_look_tells_of_all_topics_what_is_due_and_how_soon(make_job):
    make_job("now")
    make_job("expired", status="expired")
    make_job("soon", due=ago(-5))
    make_job("soon", due=ago(-8), priority=9)
    make_job("far", due=ago(-500))
    make_job("running", status="running")
    make_job("failed", status="failed")
    topics = ["now", "expired", "soon", "far", "running", "failed", "empty"]

    found = database_of(connection).look(connection, dict.fromkeys(topics), 10.0)
    soon = found.pop("soon")
    assert found == {"now": 0.0, "expired": 0.0}
    assert 4 < soon <= 5


# -- renew -----------------------------------------------------------------------


def test_a_renewal_makes_the_lease_last_from_now(make_job, claim_one, wind_back):
    make_job("receipts")
    claim = claim_one("receipts", lease=30)
    wind_back(claim, seconds=25)
    assert queue.renew(connection, [claim]) == {claim.job_id}

    assert 29 < seconds_until(row(claim).lease_until) <= 30.01


def test_a_renewal_never_shortens_a_lease(make_job, claim_one):
    make_job("receipts")
    claim = claim_one("receipts", lease=30)
    later = ago(-3600)
    Job.objects.update(lease_until=later)
    queue.renew(connection, [claim])

    assert row(claim).lease_until == later


def test_an_expired_claim_that_nobody_took_can_still_be_renewed(make_job, claim_one, wind_back):
    make_job("receipts")
    claim = claim_one("receipts", lease=30)
    wind_back(claim, seconds=100)

    assert queue.renew(connection, [claim]) == {claim.job_id}
    assert seconds_until(row(claim).lease_until) > 29


# -- the ends of a claim ---------------------------------------------------------


def test_a_completed_job_is_gone(make_job, claim_one):
    make_job("receipts", key="k")
    claim = claim_one("receipts")

    assert ENDS["complete"](claim) == {claim.job_id}
    assert not Job.objects.exists()


def test_a_retried_job_waits_for_its_pause_with_its_error(make_job, claim_one, claim_some):
    make_job("receipts")
    claim = claim_one("receipts")
    ENDS["retry"](claim)

    after = row(claim)
    assert (after.status, after.worker, after.lease_until) == ("pending", "", None)
    assert (after.attempts, after.error, after.traceback) == (1, "ValueError: x", "trace")
    assert 7 < seconds_until(after.due) <= 8.01
    assert claim_some("receipts") == []


def test_a_failed_job_stays_for_a_person_with_its_error(make_job, claim_one, claim_some):
    job = make_job("receipts")
    claim = claim_one("receipts")
    ENDS["fail"](claim)

    after = row(claim)
    assert (after.status, after.failed, after.worker, after.lease_until) == (
        "failed",
        True,
        "",
        None,
    )
    assert (after.attempts, after.error, after.traceback) == (1, "ValueError: x", "trace")
    assert after.due == job.due
    assert claim_some("receipts") == []


def test_a_job_that_failed_unrun_has_used_no_attempt(make_job, claim_one):
    make_job("receipts", attempts=4)
    claim = claim_one("receipts")
    ENDS["fail_unrun"](claim)

    after = row(claim)
    assert (after.status, after.attempts, after.error) == ("failed", 4, "ValueError: x")


def test_a_snoozed_job_waits_and_has_used_no_attempt(make_job, claim_one):
    make_job("receipts", attempts=2)
    claim = claim_one("receipts")
    ENDS["snooze"](claim)

    after = row(claim)
    assert (after.status, after.attempts, after.lease_until) == ("pending", 2, None)
    assert 7 < seconds_until(after.due) <= 8.01


def test_a_job_given_back_is_at_its_old_place_and_has_used_no_attempt(make_job, claim_one):
    job = make_job("receipts", attempts=2, due=ago(77))
    claim = claim_one("receipts")
    ENDS["give_back"](claim)

    after = row(claim)
    assert (after.status, after.attempts, after.lease_until) == ("pending", 2, None)
    assert after.due == job.due
    again = claim_one("receipts")
    assert (again.job_id, again.attempt, again.suspect) == (job.pk, 3, False)


@pytest.mark.parametrize("end", ["snooze", "give_back", "fail_unrun"])
def test_attempts_never_go_below_zero(make_job, claim_one, end):
    make_job("receipts")
    claim = claim_one("receipts")
    Job.objects.update(attempts=0)  # an operator resets them meanwhile

    assert ENDS[end](claim) == {claim.job_id}
    assert row(claim).attempts == 0


@pytest.mark.parametrize("end", ENDS)
def test_only_the_holder_of_the_claim_changes_the_job(make_job, claim_one, wind_back, end):
    make_job("receipts")
    first = claim_one("receipts", lease=30)
    wind_back(first, seconds=31)
    second = claim_one("receipts", lease=30)
    before = Job.objects.values().get()

    assert ENDS[end](first) == set()
    assert Job.objects.values().get() == before
    assert ENDS[end](second) == {second.job_id}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_deleted_while_it_ran_is_not_created_again(make_job, claim_one, end):
    make_job("receipts")
    claim = claim_one("receipts")
    assert jobs.discard(claim.job_id)

    assert ENDS[end](claim) == set()
    assert not Job.objects.exists()


@pytest.mark.parametrize("end", [end for end in ENDS if end != "renew"])
def test_a_claim_ends_once(make_job, claim_one, end):
    make_job("receipts")
    claim = claim_one("receipts")

    assert ENDS[end](claim) == {claim.job_id}
    assert ENDS[end](claim) == set()


def test_one_statement_ends_many_claims_and_tells_which_were_held(make_job, claim_some):
    for _ in range(20):
        make_job("receipts")
    claims = claim_some("receipts")
    lost = [claim.job_id for claim in claims[::3]]
    Job.objects.filter(pk__in=lost).update(worker="somebody.1")

    with CaptureStatements() as statements:
        ended = queue.complete(connection, claims)
    assert ended == {claim.job_id for claim in claims} - set(lost)
    assert set(Job.objects.values_list("pk", flat=True)) == set(lost)
    assert len(statements) <= 1


class CaptureStatements:
    """Counts what goes through Django's cursor."""

    def __enter__(self) -> list[str]:
        self.seen: list[str] = []

        def see(execute, sql, params, many, context):  # type: ignore[no-untyped-def]
            self.seen.append(sql)
            return execute(sql, params, many, context)

        self.wrapper = connection.execute_wrapper(see)
        self.wrapper.__enter__()
        return self.seen

    def __exit__(self, *raised: object) -> None:
        self.wrapper.__exit__(*raised)


def test_errors_of_every_kind_of_text_are_stored_in_one_statement(make_job, claim_some):
    texts = ["plain", "", 'it\'s "quoted"', "ünï 😀", "100 %s %(x)s \\ $1 $$", "a\nb\tc", "null"]
    for _ in texts:
        make_job("receipts")
    claims = claim_some("receipts")
    failures = [Failure(claim, text, text * 2) for claim, text in zip(claims, texts, strict=True)]

    assert len(queue.fail(connection, failures)) == len(texts)
    for claim, text in zip(claims, texts, strict=True):
        assert (row(claim).error, row(claim).traceback) == (text, text * 2)


def test_still_held_tells_which_claims_are_ours(make_job, claim_some):
    for _ in range(3):
        make_job("receipts")
    kept, taken, deleted = claim_some("receipts")
    Job.objects.filter(pk=taken.job_id).update(worker="somebody.1")
    jobs.discard(deleted.job_id)

    assert queue.still_held(connection, [kept, taken, deleted]) == {kept.job_id}
    assert queue.still_held(connection, []) == set()


@pytest.mark.parametrize("end", ["complete", "give_back", "fail", "retry", "snooze", "renew"])
def test_nothing_to_end_is_no_error(end):
    assert getattr(queue, end)(connection, []) == set()


def test_an_end_joined_to_a_transaction_commits_with_it(make_job, claim_one):
    make_job("receipts")
    claim = claim_one("receipts")
    with transaction.atomic():
        queue.complete_joined(connection, claim)
        transaction.set_rollback(True)
    assert row(claim).status == "running"

    with transaction.atomic():
        queue.complete_joined(connection, claim)
    assert not Job.objects.exists()


def test_an_end_joined_to_a_transaction_is_refused_when_the_claim_was_lost(
    make_job, claim_one, wind_back
):
    make_job("receipts")
    first = claim_one("receipts", lease=30)
    wind_back(first, seconds=31)
    claim_one("receipts", lease=30)

    with pytest.raises(ClaimLost, match="claimed again after attempt 1"), transaction.atomic():
        queue.complete_joined(connection, first)
    assert row(first).attempts == 2


# -- a person's part ---------------------------------------------------------------


def test_retry_runs_a_failed_job_again_with_all_its_attempts(make_job, claim_one):
    job = make_job(status="failed")

    assert jobs.retry(job.pk) is True
    assert jobs.retry(job.pk) is False
    assert claim_one(job.topic).attempt == 1


@pytest.mark.parametrize("state", ["pending", "running", "expired"])
def test_retry_does_nothing_to_a_job_that_has_not_failed(make_job, state):
    job = make_job(status=state)
    before = Job.objects.values().get()

    assert jobs.retry(job.pk) is False
    assert jobs.retry(10**12) is False
    assert Job.objects.values().get() == before


def test_retry_runs_a_job_now_that_sql_marked_failed_before_it_was_due(make_job, claim_one):
    later = make_job(status="failed", attempts=0, due=ago(-600))
    earlier = make_job(status="failed")

    assert jobs.retry(later.pk)
    assert jobs.retry(earlier.pk)
    assert Job.objects.get(pk=earlier.pk).due == earlier.due  # its old place
    assert [claim_one().job_id, claim_one().job_id] == [earlier.pk, later.pk]


@pytest.mark.parametrize("job_id", [0, -1, 2**63 - 1, 2**63, 2**70, -(2**70)])
def test_a_number_that_no_job_has_is_neither_retried_nor_discarded(job_id):
    assert jobs.retry(job_id) is False
    assert jobs.discard(job_id) is False


@pytest.mark.parametrize("state", ["pending", "running", "expired", "failed"])
def test_discard_deletes_a_job_in_any_state(make_job, state):
    job = make_job(status=state)
    other = make_job()

    assert jobs.discard(job.pk) is True
    assert jobs.discard(job.pk) is False
    assert [one.pk for one in Job.objects.all()] == [other.pk]


def test_get_returns_the_row_or_none(make_job):
    job = make_job()

    assert jobs.get(job.pk) == job
    jobs.discard(job.pk)
    assert jobs.get(job.pk) is None


# -- what is logged ------------------------------------------------------------------


def test_put_and_claim_are_logged_without_the_payload(claim_one, caplog):
    caplog.set_level(logging.DEBUG, logger="myxo_jobs")
    job_id = jobs.put(Work("a secret"))
    claim_one()

    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"job={job_id} topic=notes.Work attempt=0 put",
        f"job={job_id} topic=notes.Work attempt=1 claimed",
    ]
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert (caplog.records[1].job, caplog.records[1].attempt) == (job_id, 1)
    assert "secret" not in caplog.text


def test_a_lease_is_as_long_as_the_handler_asks(make_job):
    make_job("receipts")
    handler = handler_of("receipts", lease=0.25)
    (claim,) = queue.claim(connection, handler, 1, token="t.1")

    assert row(claim).lease_until - row(claim).started_at == timedelta(seconds=0.25)
