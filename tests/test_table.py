"""The table as people and their SQL meet it: its columns, its statements, its moments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from django.apps import apps
from django.core import serializers
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.test import override_settings
from django.utils import timezone

from myxo_jobs import Jobs
from myxo_jobs.models import Job
from tests.app.jobs import Work
from tests.rig import STATES

jobs = Jobs()
pytestmark = pytest.mark.django_db


def sql(statement: str) -> list[tuple[object, ...]]:
    """Run a statement as it stands, outside Django's parameter style; return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


# -- status -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "status"),
    [("pending", "pending"), ("running", "running"), ("expired", "running"), ("failed", "failed")],
)
def test_status_is_derived_by_the_database(make_job, state, status):
    assert make_job(status=state).status == status
    assert Job.objects.filter(status=status).count() == 1


@pytest.mark.parametrize(
    ("failed", "due", "worker", "status"),
    [
        (True, None, "w.1", "failed"),
        (False, None, "w.1", "done"),
        (False, None, "", "done"),
        (False, "now", "w.1", "running"),
        (False, "now", "", "pending"),
    ],
)
def test_status_depends_on_failed_then_due_then_worker(make_job, failed, due, worker, status):
    job = make_job(failed=failed, due=due and timezone.now(), worker=worker)

    assert job.status == status


def test_a_job_says_how_often_it_was_retried_and_of_what_kind_it_is(make_job):
    job = make_job("receipts", attempts=0)
    assert (job.kind, job.retry_count) == ("receipts", 0)
    job.attempts = 1
    assert job.retry_count == 0
    job.attempts = 10
    assert job.retry_count == 9


# -- the statements ------------------------------------------------------------


def test_failed_jobs_are_listed_by_sql(make_job):
    make_job(status="pending")
    failed = make_job("receipts", status="failed")

    rows = sql("select id, topic, attempts, error from myxo_jobs where failed;")
    assert rows == [
        (failed.pk, "receipts", 10, "ConnectionRefusedError: [Errno 111] Connection refused")
    ]


@pytest.mark.django_db(transaction=True)
def test_a_failed_job_runs_again_now_by_sql(make_job, claim_one):
    job = make_job(status="failed")
    sql(f"update myxo_jobs set failed = false, attempts = 0 where id = {job.pk};")

    job.refresh_from_db()
    assert job.status == "pending"
    claim = claim_one(job.topic)
    assert (claim.job_id, claim.attempt, claim.suspect) == (job.pk, 1, False)


@pytest.mark.django_db(transaction=True)
def test_a_job_is_put_by_sql(claim_one):
    sql("insert into myxo_jobs (topic, payload) values ('notes.CountWords', '{\"note_id\": 1}');")

    job = Job.objects.get()
    assert (job.status, job.key, job.priority, job.attempts) == ("pending", None, 0, 0)
    assert (job.worker, job.failed, job.error, job.traceback) == ("", False, "", "")
    assert abs(timezone.now() - job.created_at) < timedelta(seconds=5)
    assert abs(timezone.now() - job.due) < timedelta(seconds=5)
    claim = claim_one("notes.CountWords")
    assert claim.handler.codec.decode(claim.payload).note_id == 1


@pytest.mark.django_db(transaction=True)
def test_a_pending_job_is_deleted_by_sql(make_job, claim_some):
    job = make_job()
    sql(f"delete from myxo_jobs where id = {job.pk};")

    assert claim_some(job.topic) == []


@pytest.mark.django_db(transaction=True)
def test_a_topic_is_renamed_by_sql(make_job, claim_one, claim_some):
    job = make_job("notes.CountWords")
    sql("update myxo_jobs set topic = 'notes.Count' where topic = 'notes.CountWords';")

    assert claim_some("notes.CountWords") == []
    assert claim_one("notes.Count").job_id == job.pk


def test_a_second_row_of_a_key_is_refused_until_the_first_has_left(make_job):
    for state in ("pending", "running", "failed"):
        first = make_job("a", status=state, key="one")
        with pytest.raises(IntegrityError), transaction.atomic():
            make_job("b", key="one")
        first.delete()
    make_job("a", key="one", due=None)  # a kept job that is done
    make_job("b", key="one")


# -- moments --------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_a_moment_comes_back_as_it_was_stored(use_tz, zone):
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        moment = timezone.now().replace(microsecond=123000)
        job = Job.objects.create(topic="t", payload="{}", due=moment)
        job.refresh_from_db()

        assert job.due == moment
        assert timezone.is_aware(job.due) is use_tz
        assert Job.objects.filter(due=moment).count() == 1
        assert Job.objects.filter(due__lt=moment).count() == 0
        assert Job.objects.filter(due__gte=moment, due__lte=moment).count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_delays_and_leases_hold_in_every_zone(use_tz, zone, claim_some, claim_one, wind_back):
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        before = timezone.now()
        job_id = jobs.put(Work("w"), delay=5)
        after = timezone.now()
        row = Job.objects.get()
        slack = timedelta(milliseconds=2)
        assert before - slack <= row.created_at <= after + slack
        assert before + timedelta(seconds=5) - slack <= row.due
        assert row.due <= after + timedelta(seconds=5) + slack
        assert claim_some() == []

        wind_back(job_id, seconds=5.1)
        claim = claim_one(lease=30)
        row.refresh_from_db()
        assert timedelta(seconds=29) < row.lease_until - timezone.now() <= timedelta(seconds=30)
        assert abs(row.started_at - timezone.now()) < timedelta(seconds=1)
        assert claim_some() == []

        wind_back(claim, seconds=30.1)
        assert claim_one().suspect


def test_the_dates_of_a_zone_are_those_of_its_calendar():
    with override_settings(TIME_ZONE="Asia/Kathmandu"):
        late = datetime(2026, 3, 1, 20, 0, tzinfo=UTC)  # the 2nd, 01:45, in Kathmandu
        Job.objects.create(topic="t", payload="{}", due=late)

        assert Job.objects.filter(due__date="2026-03-02").count() == 1
        assert Job.objects.filter(due__hour=1).count() == 1
        assert Job.objects.dates("due", "day")[0].day == 2
        assert Job.objects.datetimes("due", "hour")[0].hour == 1


# -- management commands --------------------------------------------------------


def test_dumpdata_and_loaddata_restore_every_column(make_job, tmp_path: Path):
    for state in STATES:
        make_job(status=state, key=state, priority=5)
    before = list(Job.objects.order_by("pk").values())
    file = tmp_path / "jobs.json"
    call_command("dumpdata", "myxo_jobs", output=str(file), verbosity=0)
    Job.objects.all().delete()
    call_command("loaddata", str(file), verbosity=0)

    assert list(Job.objects.order_by("pk").values()) == before


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("format_", ["json", "jsonl", "python"])
def test_a_job_is_serialized_and_restored_as(make_job, format_, use_tz):
    with override_settings(USE_TZ=use_tz):
        make_job(status="running")
        before = Job.objects.values().get()
        text = serializers.serialize(format_, Job.objects.all())
        Job.objects.all().delete()
        for restored in serializers.deserialize(format_, text):
            restored.save()

        assert Job.objects.values().get() == before


@pytest.mark.django_db(transaction=True)
def test_flush_empties_the_table_and_it_works_on(make_job, claim_one):
    make_job(key="one")
    call_command("flush", interactive=False, verbosity=0)

    assert not Job.objects.exists()
    assert jobs.put(Work("after"), key="one")
    assert claim_one().attempt == 1


@pytest.mark.django_db(databases=["default", "other"])
def test_jobs_are_read_from_the_database_that_is_written(settings, make_job):
    settings.DATABASE_ROUTERS = ["tests.test_table.ReadsElsewhere"]
    job = make_job()

    assert Job.objects.get(pk=job.pk) == job
    assert jobs.get(job.pk) == job
    assert not Job.objects.using("other").exists()


class ReadsElsewhere:
    """Sends reads to another database, as a router does that knows a replica."""

    def db_for_read(self, model: type, **hints: object) -> str:
        return "other"

    def db_for_write(self, model: type, **hints: object) -> str:
        return "default"


def test_every_column_of_a_new_row_has_a_default_in_the_database():
    needed = {"topic", "payload"}
    for field in apps.get_model("myxo_jobs", "Job")._meta.fields:
        if not (field.primary_key or field.generated):
            assert field.has_db_default() or field.null or field.name in needed, field.name


# -- kept jobs ------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_plain_job_has_nothing_in_the_columns_of_kept_ones(make_job, claim_one):
    job = make_job()
    names = [field.attname for field in Job._meta.concrete_fields]
    kept = names[names.index("uid") :]
    assert len(kept) == 22
    claim_one()
    job.refresh_from_db()
    assert {getattr(job, name) for name in kept} == {None}


def test_two_jobs_never_have_one_uid(make_job):
    uid = uuid4()
    make_job(uid=uid)
    make_job()
    make_job()
    with pytest.raises(IntegrityError), transaction.atomic():
        make_job(uid=uid)
