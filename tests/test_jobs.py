"""The public door: a put is a row of the caller's transaction."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import msgspec
import pytest
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase, override_settings
from django.utils import timezone as django_timezone

from myxo_jobs import CALLER, Jobs, PayloadInvalid, job
from myxo_jobs.models import Job
from tests.app.jobs import Break, CountWords, Work
from tests.app.models import Note
from tests.rig import claim_some, in_threads

jobs = Jobs()
real = pytest.mark.django_db(transaction=True)


def elsewhere(function):
    """Return what a function returns on another connection."""
    return in_threads(function)[0]


def waiting() -> list[str]:
    """Return the names of the jobs in the queue, as another connection sees them."""
    rows = elsewhere(lambda: list(Job.objects.order_by("pk").values_list("payload", flat=True)))
    return [msgspec.json.decode(payload)["name"] for payload in rows]


# -- the caller's transaction ------------------------------------------------------


@real
def test_a_put_outside_a_transaction_commits_at_once():
    job_id = jobs.put(Work("alone"))

    assert isinstance(job_id, int)
    assert waiting() == ["alone"]


@real
def test_a_put_is_seen_by_others_with_the_commit_and_its_id_stays():
    with transaction.atomic():
        job_id = jobs.put(Work("joined"))
        assert Job.objects.get(pk=job_id).status == "pending"
        assert jobs.get(job_id).topic == "notes.Work"
        assert elsewhere(lambda: jobs.get(job_id)) is None
    assert elsewhere(lambda: jobs.get(job_id)).status == "pending"


@real
def test_a_rolled_back_put_leaves_no_job():
    put: list[int | None] = []

    @transaction.atomic
    def view() -> None:
        put.append(jobs.put(Work("undone")))
        assert jobs.get(put[0])
        raise LookupError

    with pytest.raises(LookupError):
        view()
    assert jobs.get(put[0]) is None
    assert waiting() == []


@real
def test_a_put_follows_the_savepoint_it_is_in():
    with transaction.atomic():
        jobs.put(Work("outer"))
        with transaction.atomic():
            jobs.put(Work("kept"))
        with transaction.atomic():
            jobs.put(Work("undone"))
            transaction.set_rollback(True)
        with connection.cursor() as cursor:
            cursor.execute("SAVEPOINT by_hand")
        jobs.put(Work("undone by hand"))
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK TO SAVEPOINT by_hand")
        jobs.put_many([Work("many")])
    assert waiting() == ["outer", "kept", "many"]


@real
def test_with_autocommit_off_a_put_commits_when_the_caller_does():
    connection.set_autocommit(False)
    try:
        jobs.put(Work("undone"))
        jobs.put_many([Work("undone too")])
        connection.rollback()
        jobs.put(Work("done"))
        assert waiting() == []
        connection.commit()
        assert waiting() == ["done"]
    finally:
        connection.set_autocommit(True)


@real
def test_with_autocommit_off_many_puts_alone_roll_back_when_the_caller_does():
    connection.set_autocommit(False)
    try:
        assert jobs.put_many([Work("undone"), Work("undone too")]) == 2
        connection.rollback()
        assert waiting() == []
        jobs.put_many([Work("done"), Work("done too")])
        assert waiting() == []
        connection.commit()
        assert waiting() == ["done", "done too"]
    finally:
        connection.set_autocommit(True)


@real
def test_with_autocommit_off_a_person_s_retry_rolls_back_when_the_caller_does(make_job):
    failed = make_job(status="failed")
    connection.set_autocommit(False)
    try:
        assert jobs.retry(failed.pk)
        connection.rollback()
        assert elsewhere(lambda: jobs.get(failed.pk)).failed
        assert jobs.retry(failed.pk)
        assert elsewhere(lambda: jobs.get(failed.pk)).failed
        connection.commit()
        assert not elsewhere(lambda: jobs.get(failed.pk)).failed
    finally:
        connection.rollback()
        connection.set_autocommit(True)


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_jobs_of_another_database_are_put_there():
    other = Jobs(using="other")
    with transaction.atomic(using="default"):
        job_id = other.put(Work("there"))
        transaction.set_rollback(True, using="default")

    assert (jobs.using, other.using) == ("default", "other")
    assert other.get(job_id).status == "pending"
    assert not Job.objects.using("default").exists()
    with transaction.atomic(using="other"):
        other.put(Work("undone"))
        assert other.put_many([Work("undone too")]) == 1
        transaction.set_rollback(True, using="other")
    assert Job.objects.using("other").count() == 1
    assert other.discard(job_id)


class QueueElsewhere:
    """Routes the jobs to the other database."""

    def db_for_write(self, model: type, **hints: object) -> str | None:
        return "other" if model is Job else None


@pytest.mark.django_db(databases=["default", "other"])
def test_the_routers_choose_the_database_at_each_call(settings):
    settings.DATABASE_ROUTERS = ["tests.test_jobs.QueueElsewhere"]
    assert jobs.using == "other"
    job_id = jobs.put(Work("routed"))
    settings.DATABASE_ROUTERS = []

    assert jobs.using == "default"
    assert jobs.get(job_id) is None
    assert Jobs(using="other").get(job_id)


# -- what it costs -----------------------------------------------------------------


class Cost(TestCase):
    def test_a_put_is_one_query(self) -> None:
        for arguments in ({}, {"key": "k"}, {"delay": 5}, {"at": django_timezone.now()}):
            with self.assertNumQueries(1):
                assert jobs.put(Work("cheap"), **arguments)

    def test_five_thousand_puts_at_once_are_a_statement_and_their_savepoint(self) -> None:
        with self.assertNumQueries(3):
            assert jobs.put_many([Work(str(number)) for number in range(5000)]) == 5000

    def test_nothing_to_put_is_no_query(self) -> None:
        with self.assertNumQueries(0):
            assert jobs.put_many([]) == 0


# -- tx=None -----------------------------------------------------------------------


@real
@pytest.mark.parametrize("tx", [CALLER, None])
def test_outside_a_transaction_both_ways_commit_at_once(tx):
    assert jobs.put(Work("alone"), tx=tx)
    assert waiting() == ["alone"]


class OwnTransactionInTestCase(TestCase):
    def test_in_a_test_case_it_joins_the_transaction_of_the_test(self) -> None:
        job_id = jobs.put(Work("test"), tx=None)

        assert jobs.get(job_id)
        assert connection.in_atomic_block
        with self.assertNumQueries(1):
            jobs.put(Work("test"), tx=None)

    def test_nothing_is_left_of_it_after_the_test(self) -> None:
        assert not Job.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("tx", ["caller", True, False, 0, connections])
def test_another_tx_is_refused(tx):
    with pytest.raises(TypeError, match="tx takes CALLER or None"):
        jobs.put(Work("x"), tx=tx)


# -- when: delay, at, priority -------------------------------------------------------


def put_due(**arguments) -> float:
    """Put a job and return in how many seconds it is due."""
    row = Job.objects.get(pk=jobs.put(Work("w"), **arguments))
    return (row.due - row.created_at).total_seconds()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        (None, 0),
        (0, 0),
        (-5, 0),
        (-timedelta(days=1), 0),
        (0.25, 0.25),
        (5, 5),
        (timedelta(minutes=2), 120),
        (10**9, 10**9),
        (-(10**300), 0),
    ],
)
def test_a_job_is_due_after_its_delay(delay, seconds):
    assert put_due(delay=delay) == pytest.approx(seconds, abs=0.05)


@real
def test_a_delay_counts_from_the_statement_not_from_the_start_of_the_transaction():
    with transaction.atomic():
        jobs.put(Work("first"))
        began = django_timezone.now()
        while django_timezone.now() - began < timedelta(seconds=0.3):
            pass
        jobs.put(Work("second"), delay=1)
        jobs.put_many([Work("third")], delay=1)
    first, second, third = Job.objects.order_by("pk").values_list("due", flat=True)

    assert (second - first).total_seconds() >= 1.29
    assert (third - first).total_seconds() >= 1.29


MOMENT = datetime(2031, 7, 1, 12, 30, 15, 123000, tzinfo=UTC)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "at",
    [
        MOMENT,
        MOMENT.astimezone(ZoneInfo("America/St_Johns")),
        MOMENT.astimezone(timezone(timedelta(hours=14))),
        datetime(1999, 12, 31, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
    ],
    ids=str,
)
def test_a_job_is_due_at_the_moment_it_names(at):
    job_id = jobs.put(Work("w"), at=at)
    assert jobs.put_many([Work("w")], at=at) == 1
    assert Job.objects.filter(due=at).count() == 2
    assert Job.objects.get(pk=job_id).due == at


@pytest.mark.django_db
def test_a_naive_moment_is_one_of_the_project_s_zone_as_in_any_field():
    naive = datetime(2031, 7, 1, 18, 15, 15)
    with override_settings(USE_TZ=False):
        job_id = jobs.put(Work("w"), at=naive)
        assert Job.objects.get(pk=job_id).due == naive
    assert Job.objects.get(pk=job_id).due == datetime(2031, 7, 1, 12, 30, 15, tzinfo=UTC)
    with pytest.warns(RuntimeWarning, match="received a naive datetime"):
        jobs.put(Work("w"), at=naive)
    assert Job.objects.filter(due=datetime(2031, 7, 1, 12, 30, 15, tzinfo=UTC)).count() == 2


@pytest.mark.django_db
@pytest.mark.parametrize(
    "arguments",
    [
        {"delay": float("nan")},
        {"delay": float("inf")},
        {"delay": float("-inf")},
        {"delay": 1e18},
        {"delay": 10**400},
        {"delay": timedelta.max},
        {"delay": 5, "at": MOMENT},
        {"delay": 0, "at": MOMENT},
        {"at": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))},
        {"at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))},
        {"priority": 101},
        {"priority": -101},
        {"key": ""},
        {"key": "x" * 256},
        {"key": "a\x00b"},
        {"key": "\ud800"},
    ],
    ids=lambda arguments: str(arguments)[:40],
)
def test_a_value_that_cannot_be_is_a_value_error_before_any_sql(
    arguments, django_assert_num_queries
):
    key = arguments.get("key")
    many = {**arguments, **({"key": lambda request: key} if key is not None else {})}
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(ValueError):  # noqa: PT011
            jobs.put(Work("w"), **arguments)
        with django_assert_num_queries(0), pytest.raises(ValueError):  # noqa: PT011
            jobs.put_many([Work("w")], **many)
        assert Note.objects.create(text="the transaction goes on").pk
    assert not Job.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("zone", "at"),
    [
        ("Asia/Kathmandu", datetime(9999, 12, 31, 20, tzinfo=UTC)),
        ("America/St_Johns", datetime(1, 1, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_moment_that_the_project_s_zone_cannot_show_is_a_value_error_before_any_sql(
    zone, at, django_assert_num_queries
):
    with override_settings(USE_TZ=False, TIME_ZONE=zone):
        with django_assert_num_queries(0), pytest.raises(ValueError, match=r"at of .* is beyond"):
            jobs.put(Work("w"), at=at)
        with django_assert_num_queries(0), pytest.raises(ValueError, match=r"at of .* is beyond"):
            jobs.put_many([Work("w")], at=at)
    assert jobs.put(Work("w"), at=at)  # with USE_TZ it is read in UTC


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"delay": "5"}, "delay"),
        ({"delay": True}, "delay"),
        ({"at": 5}, "at"),
        ({"at": date(2031, 7, 1)}, "at"),
        ({"at": "2031-07-01"}, "at"),
        ({"priority": "1"}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"key": 5}, "key"),
        ({"key": b"k"}, "key"),
        ({"key": Work("w")}, "key"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_a_type_error_naming_it(
    arguments, named, django_assert_num_queries
):
    with django_assert_num_queries(0), pytest.raises(TypeError, match=f"^{named} takes"):
        jobs.put(Work("w"), **arguments)


@pytest.mark.django_db
def test_priority_is_the_handler_s_unless_given():
    class Urgent(msgspec.Struct):
        name: str

    @job(Urgent, topic="t", priority=7)
    def handle(request: Urgent) -> None: ...

    jobs.put(Urgent("1"))
    jobs.put(Urgent("2"), priority=0)
    jobs.put_many([Urgent("3"), Work("4")])
    jobs.put_many([Urgent("5"), Work("6")], priority=-3)
    assert list(Job.objects.order_by("pk").values_list("priority", flat=True)) == [
        7,
        0,
        7,
        0,
        -3,
        -3,
    ]


# -- many ----------------------------------------------------------------------------


@real
def test_many_jobs_of_several_structs_are_put_in_their_order():
    count = jobs.put_many(request for request in (Work("1"), CountWords(2), Break("3"), Work("4")))

    assert count == 4
    topics = list(Job.objects.order_by("pk").values_list("topic", flat=True))
    assert topics == ["notes.Work", "notes.CountWords", "notes.Break", "notes.Work"]


@real
@pytest.mark.parametrize("bad", [CountWords, 5, None, Work(5), Work(object())], ids=repr)  # type: ignore[arg-type]
def test_many_are_put_or_none(bad):
    with pytest.raises((ValueError, TypeError)):
        jobs.put_many([Work("1"), Work("2"), bad])
    assert not Job.objects.exists()


@real
@pytest.mark.parametrize("count", [2, 2_000])
def test_many_jobs_are_put_as_single_ones_are(count):
    """A large number takes another way into the table, where nobody gives a key or a delay."""
    own = {"id", "payload", "due", "created_at"}

    def shared_columns() -> list[dict[str, object]]:
        return [
            {name: value for name, value in row.items() if name not in own}
            for row in Job.objects.order_by("pk").values()
        ]

    texts = ["plain", "tab\t and \\N", 'line\nbreak "quoted" \\t', "žluťoučký 🐎", ""]
    names = [texts[number % len(texts)] for number in range(count)]
    jobs.put(Work("single"))
    assert jobs.put_many(Work(name) for name in names) == count

    single, *many = Job.objects.order_by("pk")
    assert [msgspec.json.decode(row.payload)["name"] for row in many] == names
    assert shared_columns() == shared_columns()[:1] * (count + 1)
    dues = [row.due for row in (single, *many)]
    assert dues == sorted(dues)
    assert [claim.job_id for claim in claim_some(limit=count + 1)] == [
        row.pk for row in (single, *many)
    ]


@real
@pytest.mark.parametrize("count", [2, 2_000])
def test_many_jobs_in_a_transaction_that_is_broken_raise_and_are_not_put(count):
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            jobs.put_many(Work(str(number)) for number in range(count))
    assert not Job.objects.exists()


@real
def test_more_than_a_statement_holds_are_put_in_one_transaction():
    def requests():
        for number in range(12_000):
            yield Work(str(number))

    assert jobs.put_many(requests(), key=lambda request: f"k{int(request.name) % 11_000}") == 11_000
    assert Job.objects.count() == 11_000
    with transaction.atomic():
        assert jobs.put_many(requests()) == 12_000
        transaction.set_rollback(True)
    assert Job.objects.count() == 11_000


@pytest.mark.django_db
def test_a_request_must_be_of_a_struct_with_a_handler(django_assert_num_queries):
    class Lonely(msgspec.Struct):
        name: str

    for request in (Lonely("x"), {"name": "x"}, None, Work):
        with django_assert_num_queries(0), pytest.raises(PayloadInvalid, match="no handler for"):
            jobs.put(request)
        with django_assert_num_queries(0), pytest.raises(PayloadInvalid, match="no handler for"):
            jobs.put_many([request])


# -- async ---------------------------------------------------------------------------


class FromAsyncCode(TransactionTestCase):
    async def test_a_put_from_async_code_commits(self) -> None:
        job_id = await jobs.aput(Work("async"), key="k", delay=5, priority=3)
        row = await Job.objects.aget(pk=job_id)

        assert (row.key, row.priority, row.status) == ("k", 3, "pending")
        assert await jobs.aput(Work("async"), key="k") is None
        assert await jobs.aput(Work("alone"), tx=None)
        with pytest.raises(ValueError, match="delay"):
            await jobs.aput(Work("async"), delay=float("nan"))

    async def test_many_coroutines_put_at_once(self) -> None:
        ids = await asyncio.gather(*[jobs.aput(Work(str(number))) for number in range(20)])

        assert len(set(ids)) == 20
        assert await Job.objects.acount() == 20


# -- before Django is ready ------------------------------------------------------------


def test_jobs_are_made_anywhere_without_a_query(django_assert_num_queries, db):
    with django_assert_num_queries(0):
        assert Jobs().using == "default"
        assert Jobs("other").using == "other"
        assert Jobs(using="nowhere").using == "nowhere"


@pytest.mark.django_db
def test_a_put_is_logged_at_debug(caplog):
    caplog.set_level(logging.DEBUG, logger="myxo_jobs")
    job_id = jobs.put(Work("w"), key="k")

    (record,) = caplog.records
    assert record.getMessage() == f"job={job_id} topic=notes.Work attempt=0 put"
    assert (record.levelname, record.job, record.topic) == ("DEBUG", job_id, "notes.Work")
    assert record.attempt == 0
