"""On SQLite every moment is UTC text with milliseconds, and nothing else is let in."""

from __future__ import annotations

import re
import sqlite3
from datetime import UTC, datetime

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import override_settings

from myxo_jobs import Jobs
from myxo_jobs.models import Job
from tests.app.jobs import Work

jobs = Jobs()
COLUMNS = ["due", "lease_until", "created_at", "started_at"]
FORM = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


def text_of(column: str, job_id: int) -> str:
    with connection.cursor() as cursor:
        # "|| ''" keeps Django from converting it
        cursor.execute(
            f"SELECT {column} || '', typeof({column}) FROM myxo_jobs WHERE id = %s", [job_id]
        )
        text, type_ = cursor.fetchone()
    assert type_ == "text"
    return text


@pytest.mark.django_db
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_a_moment_is_stored_as_utc_text_whatever_the_zone(use_tz, zone):
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        at = datetime(2031, 7, 1, 12, 30, 15, 123999, tzinfo=UTC)
        job_id = jobs.put(Work("w"), at=at)
        assert text_of("due", job_id) == "2031-07-01 12:30:15.123"
        Job.objects.filter(pk=job_id).update(due=Job.objects.get(pk=job_id).due)
        assert text_of("due", job_id) == "2031-07-01 12:30:15.123"


@pytest.mark.django_db
def test_what_the_database_fills_in_has_the_same_form(make_job):
    with connection.cursor() as cursor:
        cursor.execute("insert into myxo_jobs (topic, payload) values ('t', '{}')")
    by_sql = Job.objects.get()
    by_orm = Job.objects.create(topic="t", payload="{}")
    by_put = jobs.put(Work("w"), delay=5.5)
    for job_id in (by_sql.pk, by_orm.pk, by_put):
        for column in ("due", "created_at"):
            assert re.fullmatch(FORM, text_of(column, job_id))


@pytest.mark.django_db
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "text",
    [
        "2031-07-01",
        "2031-07-01 12:30:15",
        "2031-07-01T12:30:15.123",
        "2031-07-01 12:30:15.123Z",
        "2031-07-01 12:30:15.123+00:00",
        "2031-07-01 12:30:15.123456",
        "now",
        "",
        1_940_000_000,
        2462684.5,
    ],
)
def test_another_form_is_refused_by_the_table(make_job, column, text):
    job = make_job()
    with (
        pytest.raises(IntegrityError, match="CHECK"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(f"UPDATE myxo_jobs SET {column} = %s WHERE id = %s", [text, job.pk])


@pytest.mark.django_db(transaction=True)
def test_the_statements_of_the_docs_work_in_the_sqlite3_module_as_they_stand(make_job):
    failed = make_job(status="failed")
    raw = sqlite3.connect(connection.settings_dict["NAME"], timeout=5)
    try:
        listed = raw.execute("select id, topic, attempts, error from myxo_jobs where failed;")
        assert [row[0] for row in listed] == [failed.pk]
        raw.execute(f"update myxo_jobs set failed = false, attempts = 0 where id = {failed.pk};")
        raw.execute(
            "insert into myxo_jobs (topic, payload) "
            "values ('notes.CountWords', '{\"note_id\": 1}');"
        )
        raw.execute("update myxo_jobs set topic = 'notes.Count' where topic = 'notes.CountWords';")
        raw.execute(f"delete from myxo_jobs where id = {failed.pk};")
        raw.commit()
    finally:
        raw.close()
    assert Job.objects.get().topic == "notes.Count"
