"""The addresses: who sees which jobs, and what the status document says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import AsyncClient, Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.translation import gettext_lazy

from myxo_jobs.models import Job
from myxo_jobs.queue import uuid7
from myxo_jobs.services import (
    JobService,
    cancel_job,
    delete_job,
    enqueue,
    get_job,
    job_document,
    register,
    status_response,
)
from tests.rig import ago, in_threads

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("private")]

HTML = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SECRET = "hunter2"
FIELDS = {
    *("uid", "kind", "title", "status", "cancelling", "reason", "message", "attempt"),
    *("max_attempts", "ahead", "progress", "created_at", "started_at", "updated_at"),
    *("completed_at", "expires_at", "result", "file", "download_url", "cancel_url"),
}


@pytest.fixture(autouse=True)
def export() -> Iterator[type[JobService]]:
    @register
    class Export(JobService):
        kind = "export"
        title = gettext_lazy("Note exports")

        def process(self, job: Any) -> None: ...

    return Export


# -- the document ----------------------------------------------------------------------


def test_the_document_of_a_running_job_has_these_fields_and_these_values(reader):
    job = reader.job(
        "running",
        attempts=1,
        progress_done=430,
        progress_total=1000,
        progress_note="Writing notes",
        updated_at=ago(1),
    )
    document = reader.document(job)

    assert set(document) == FIELDS
    for moment in ("created_at", "started_at", "updated_at"):
        expected = getattr(job, moment).timestamp()
        assert document[moment].endswith("Z")
        assert timezone.datetime.fromisoformat(document[moment]).timestamp() == expected
        del document[moment]
    assert document == {
        "uid": str(job.uid),
        "kind": "export",
        "title": "Note exports",
        "status": "running",
        "cancelling": False,
        "reason": "",
        "message": "",
        "attempt": 1,
        "max_attempts": 3,
        "ahead": None,
        "progress": {"done": 430, "total": 1000, "percent": 43, "note": "Writing notes"},
        "completed_at": None,
        "expires_at": None,
        "result": None,
        "file": None,
        "download_url": None,
        "cancel_url": f"/jobs/{job.uid}/cancel/",
    }
    assert job_document(get_job(job.uid)) == reader.document(job)


def test_the_document_of_a_done_job_tells_its_file_and_its_result(reader):
    job = reader.job_with_file(b"12345", preferred_name="My notes.csv")
    document = reader.document(job)

    assert set(document) == FIELDS
    assert document["result"] == {"words": 3}
    assert document["file"] == {"name": "My notes.csv", "bytes": 5}
    assert document["download_url"] == f"/jobs/{job.uid}/download/"
    assert document["cancel_url"] is None
    assert None not in (document["completed_at"], document["expires_at"])
    assert b"myxo_jobs/export" not in reader.client.get(f"/jobs/{job.uid}/").content


def test_the_document_of_a_failed_job_tells_its_owners_sentence_and_no_operators(reader):
    job = reader.job(
        "failed",
        reason="refused",
        message="There are no notes.",
        error=f"ValueError: {SECRET}",
        traceback=SECRET,
        attempt_log=json.dumps([SECRET]),
        payload=json.dumps(SECRET),
        result=json.dumps({"file": SECRET}),
        expires_at=ago(-60),
    )
    document = reader.document(job)

    assert (document["status"], document["reason"]) == ("failed", "refused")
    assert document["message"] == "There are no notes."
    assert (document["result"], document["file"], document["download_url"]) == (None, None, None)
    for address in (f"/jobs/{job.uid}/", "/jobs/", f"/own/?uid={job.uid}&kind=export"):
        for headers in ({}, HTML):
            content = reader.client.get(address, headers=headers).content.decode()
            assert SECRET not in content


@pytest.mark.parametrize("status", ["pending", "running"])
def test_what_an_earlier_end_has_left_is_not_shown(reader, status):
    job = reader.job(
        status,
        attempts=1,
        completed_at=ago(100),
        expires_at=ago(50),
        reason="error",
        message="It did not work.",
    )
    document = reader.document(job)

    shown = [document[n] for n in ("completed_at", "expires_at", "reason", "message", "result")]
    assert shown == [None, None, "", "", None]


@pytest.mark.parametrize(
    ("status", "done", "total", "percent"),
    [
        ("running", None, None, None),
        ("running", 5, None, None),
        ("running", 0, 10, 0),
        ("running", 999, 1000, 99),
        ("running", 1000, 1000, 99),
        ("running", 9995, 10000, 99),
        ("running", 1001, 1000, None),
        ("running", 0, 0, None),
        ("running", 0.5, 2, 25),
        ("failed", 10, 10, 99),
        ("done", 10, 10, 100),
        ("done", 5, None, None),
    ],
)
def test_per_cent_is_null_without_a_total_and_100_only_when_done(
    reader, status, done, total, percent
):
    job = reader.job(status, progress_done=done, progress_total=total)
    progress = reader.document(job)["progress"]

    assert progress == {"done": done, "total": total, "percent": percent, "note": ""}


def test_ahead_counts_the_jobs_of_the_kind_that_come_before_to_100(reader, make_job):
    make_job("export", due=ago(70))
    make_job("export", priority=5, due=ago(1))
    make_job("export", priority=5, due=ago(-600))  # not yet
    make_job("other", due=ago(70))
    make_job("export", status="failed")
    make_job("export", status="done")
    mine = reader.job("pending", due=ago(60))
    make_job("export", due=ago(50))
    make_job("export", status="running", due=ago(65))
    assert reader.document(mine)["ahead"] == 3

    for _ in range(120):
        make_job("export", due=ago(70))
    assert reader.document(mine)["ahead"] == 100
    assert reader.document(reader.job("running"))["ahead"] is None


def test_updated_at_moves_with_progress_and_not_with_renewals(reader):
    job = reader.job("running", updated_at=ago(30))
    Job.objects.filter(pk=job.pk).update(lease_until=ago(-100))

    told = timezone.datetime.fromisoformat(reader.document(job)["updated_at"])
    assert told.timestamp() == job.updated_at.timestamp()


def test_a_service_says_what_of_its_result_the_owner_sees(reader, export, monkeypatch):
    monkeypatch.setattr(export, "public_result", lambda self, job: {"pages": job.result["words"]})
    job = reader.job_with_file()

    assert reader.document(job)["result"] == {"pages": 3}


def test_the_title_speaks_the_language_of_the_job(reader, export, monkeypatch):
    monkeypatch.setattr(export, "title", gettext_lazy("Yes"))

    assert reader.document(reader.job("running", language="de"))["title"] == "Ja"


def test_a_kept_job_that_is_no_service_is_told_too(reader):
    job = reader.job("done", kind="notes.Kept", result='{"words":3}')
    document = reader.document(job)

    assert (document["title"], document["max_attempts"]) == ("notes.Kept", None)
    assert document["result"] == {"words": 3}


@pytest.mark.parametrize("use_tz", [True, False])
def test_moments_are_utc_whatever_the_project_uses(reader, settings, use_tz):
    job = reader.job("running", updated_at=ago(30))
    settings.USE_TZ = use_tz
    told = timezone.datetime.fromisoformat(reader.document(job)["updated_at"])

    assert told.timestamp() == job.updated_at.timestamp()
    assert reader.client.get(f"/jobs/{job.uid}/")["Retry-After"] == "4"


# -- its headers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "age", "wait"),
    [
        ("pending", 0, "1"),
        ("running", 10, "1"),
        ("running", 90, "4"),
        ("pending", 199, "9"),
        ("running", 3600, "15"),
        ("done", 90, None),
        ("failed", 90, None),
    ],
)
def test_retry_after_grows_with_the_age_of_the_job(reader, status, age, wait):
    job = reader.job(status, created_at=ago(age))

    for headers in ({}, HTML):
        response = reader.client.get(f"/jobs/{job.uid}/", headers=headers)
        assert response.get("Retry-After") == wait
        assert response["Cache-Control"] == "private, no-cache"
        assert "Accept" in response["Vary"]


def test_the_etag_is_of_the_body_and_spares_it(reader):
    job = reader.job("running", progress_done=1, progress_total=10)
    first = reader.client.get(f"/jobs/{job.uid}/")
    again = reader.client.get(f"/jobs/{job.uid}/", headers={"If-None-Match": first["ETag"]})
    Job.objects.filter(pk=job.pk).update(progress_done=2)
    moved = reader.client.get(f"/jobs/{job.uid}/", headers={"If-None-Match": first["ETag"]})

    assert (again.status_code, again.content) == (304, b"")
    assert again["Retry-After"] == first["Retry-After"]
    assert (moved.status_code, moved["ETag"] == first["ETag"]) == (200, False)


@pytest.mark.parametrize("status", ["pending", "running", "done", "failed"])
def test_at_most_two_narrow_queries_besides_session_and_user(reader, status):
    job = reader.job(status, result='{"words":3}' if status == "done" else None)

    for headers in ({}, HTML):
        with CaptureQueriesContext(connection) as queries:
            reader.client.get(f"/jobs/{job.uid}/", headers=headers)
        own = [one["sql"] for one in queries if "myxo_jobs" in one["sql"]]
        assert len(queries) - len(own) == 2, "the session and the user"
        assert len(own) == (2 if status == "pending" else 1)
        for column in ("payload", "traceback", "attempt_log"):
            assert column not in " ".join(own)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("image/png", "application/json"),
        ("text/html;q=0.5, application/json", "application/json"),
        (HTML["Accept"], "text/html; charset=utf-8"),
        ("text/html", "text/html; charset=utf-8"),
    ],
)
def test_it_is_json_or_a_page_where_accept_prefers_one(reader, accept, kind):
    job = reader.job("running")
    headers = {"Accept": accept} if accept else {}

    assert reader.client.get(f"/jobs/{job.uid}/", headers=headers)["Content-Type"] == kind
    assert reader.client.get("/jobs/", headers=headers)["Content-Type"] == kind


# -- who may see -----------------------------------------------------------------------


def answers(client: Client, uid: object, headers: dict[str, str]) -> list[Any]:
    """Return all that somebody is told of a job, at each address."""
    told = []
    for method, end in (
        ("get", ""),
        ("head", ""),
        ("get", "download/"),
        ("head", "download/"),
        ("post", "cancel/"),
        ("post", "delete/"),
    ):
        response = getattr(client, method)(f"/jobs/{uid}/{end}", headers=headers)
        body = response.content.decode().replace(str(uid), "<uid>")
        told.append((response.status_code, dict(response.headers), body))
    page = client.get(f"/own/?uid={uid}&kind=export").content.decode().replace(str(uid), "<uid>")
    return [*told, page]


@pytest.mark.parametrize("headers", [{}, HTML], ids=["json", "page"])
@pytest.mark.parametrize("status", ["pending", "running", "done", "failed", "expired"])
def test_who_may_not_see_a_job_is_answered_as_if_it_did_not_exist(reader, another, headers, status):
    columns = {"expires_at": ago(5)} if status == "expired" else {}
    job = reader.job_with_file(**columns) if status in ("done", "expired") else reader.job(status)
    nobody = Client()

    for client in (another.client, nobody):
        unknown = answers(client, uuid7(), headers)
        assert answers(client, job.uid, headers) == unknown
        assert [one[0] for one in unknown[:-1]] == [404] * 6
        assert "Not available" in unknown[-1]
    assert Job.objects.get(pk=job.pk).status == job.status
    assert Job.objects.get(pk=job.pk).cancelled_at is None


@pytest.mark.parametrize("uid", ["x", "0", "..", "%00", "é", "0" * 36, "a" * 3000])
def test_what_is_no_uid_is_answered_as_one_that_does_not_exist(reader, uid):
    assert answers(reader.client, uid, {})[:-1] == answers(reader.client, uuid7(), {})[:-1]


def test_staff_see_a_job_with_the_permission_and_only_with_it(reader, make_job, client):
    from tests.services.conftest import Reader

    job = reader.job("running")
    nobodys = enqueue("export", {})
    staff = Reader("staff", make_job, is_staff=True)
    plain = Reader("plain", make_job)
    permission = Permission.objects.get(codename="view_job")
    assert staff.client.get(f"/jobs/{job.uid}/").status_code == 404
    for one in (staff, plain):
        one.user.user_permissions.add(permission)

    for uid in (job.uid, nobodys):
        assert staff.client.get(f"/jobs/{uid}/").status_code == 200
        assert plain.client.get(f"/jobs/{uid}/").status_code == 404
    assert reader.client.get(f"/jobs/{nobodys}/").status_code == 404


def test_a_user_who_is_no_longer_active_sees_nothing(reader):
    job = reader.job("running")
    reader.user.is_active = False
    reader.user.save()

    assert reader.client.get(f"/jobs/{job.uid}/").status_code == 404


def test_a_service_decides_who_may_see_its_jobs(reader, another, export, monkeypatch):
    job, other = reader.job("running"), reader.job("running", kind="other")
    monkeypatch.setattr(export, "may_see", lambda self, request, job: job.payload["open"])
    Job.objects.filter(pk=job.pk).update(payload='{"open":true}')

    assert another.client.get(f"/jobs/{job.uid}/").status_code == 200
    Job.objects.filter(pk=job.pk).update(payload='{"open":false}')
    assert reader.client.get(f"/jobs/{job.uid}/").status_code == 404
    assert [one["uid"] for one in reader.client.get("/jobs/").json()["jobs"]] == [str(other.uid)]


# -- expired ---------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, HTML], ids=["json", "page"])
@pytest.mark.parametrize("status", ["done", "failed"])
def test_an_expired_job_is_gone_and_its_owner_is_told_so(reader, headers, status):
    job = reader.job(status, expires_at=ago(1))

    for end in ("", "download/"):
        response = reader.client.get(f"/jobs/{job.uid}/{end}", headers=headers)
        assert response.status_code == 404
        assert b"It has expired" in response.content
    for end in ("cancel/", "delete/"):
        assert reader.client.post(f"/jobs/{job.uid}/{end}").status_code == 404
    assert reader.client.get("/jobs/").json()["jobs"] == []


# -- cancel and delete -----------------------------------------------------------------


def test_a_waiting_job_is_cancelled_and_the_document_says_so(reader):
    job = reader.job("pending")
    response = reader.client.post(f"/jobs/{job.uid}/cancel/")

    assert response.status_code == 200
    document = response.json()
    assert set(document) == FIELDS
    assert (document["status"], document["reason"]) == ("failed", "cancelled")
    assert document["message"]
    assert (document["cancel_url"], document["ahead"]) == (None, None)


def test_a_running_job_is_asked_to_stop(reader):
    job = reader.job("running")
    for _ in range(2):
        response = reader.client.post(f"/jobs/{job.uid}/cancel/")
        assert response.status_code == 200
        assert (response.json()["status"], response.json()["cancelling"]) == ("running", True)

    assert Job.objects.get(pk=job.pk).cancelled_at is not None


@pytest.mark.parametrize("status", ["done", "failed"])
def test_nothing_left_to_cancel_is_a_conflict_with_the_document(reader, status):
    job = reader.job(status)
    response = reader.client.post(f"/jobs/{job.uid}/cancel/")

    assert response.status_code == 409
    assert response.json()["status"] == status
    assert response.json()["uid"] == str(job.uid)


def test_a_service_that_cannot_be_cancelled_refuses_and_offers_no_address(reader):
    @register
    class Fixed(JobService):
        kind = "fixed"
        cancellable = False

        def process(self, job: Any) -> None: ...

    job = reader.job("running", kind="fixed")
    assert reader.document(job)["cancel_url"] is None
    assert reader.client.post(f"/jobs/{job.uid}/cancel/").status_code == 409
    assert reader.client.post(f"/jobs/{job.uid}/delete/").status_code == 409
    assert Job.objects.get(pk=job.pk).cancelled_at is None


@pytest.mark.parametrize("status", ["pending", "running", "done", "failed"])
def test_a_form_is_sent_to_the_page(reader, status):
    job = reader.job(status)
    response = reader.client.post(f"/jobs/{job.uid}/cancel/", headers=HTML)

    assert (response.status_code, response["Location"]) == (303, f"/jobs/{job.uid}/")


def test_a_job_is_deleted_with_its_file(reader, files):
    job = reader.job_with_file()
    waiting = reader.job("pending")

    assert reader.client.post(f"/jobs/{job.uid}/delete/").status_code == 204
    response = reader.client.post(f"/jobs/{waiting.uid}/delete/", headers=HTML)
    assert (response.status_code, response["Location"]) == (303, "/jobs/")
    assert files() == []
    assert not Job.objects.exists()


def test_a_running_job_is_not_deleted_but_asked_to_stop(reader):
    job = reader.job("running")
    response = reader.client.post(f"/jobs/{job.uid}/delete/")

    assert (response.status_code, response.json()["cancelling"]) == (202, True)
    assert Job.objects.filter(pk=job.pk).exists()


def test_changes_are_posted_and_by_nobody_elses_form(reader):
    job = reader.job("pending")
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(reader.user)

    for end in ("cancel/", "delete/"):
        assert reader.client.get(f"/jobs/{job.uid}/{end}").status_code == 405
    assert reader.client.post(f"/jobs/{job.uid}/").status_code == 405
    assert reader.client.post(f"/jobs/{job.uid}/download/").status_code == 405
    assert get_job(job.uid).status == "pending"


# -- the list --------------------------------------------------------------------------


def test_the_list_has_the_readers_own_jobs_newest_first_20_a_page(reader, another):
    jobs = [reader.job("done" if n % 2 else "running") for n in range(45)]
    another.job()
    reader.job(expires_at=ago(1))
    seen: list[str] = []
    address: str | None = "/jobs/"
    sizes = []
    while address:
        page = reader.client.get(address).json()
        seen += [job["uid"] for job in page["jobs"]]
        sizes.append(len(page["jobs"]))
        address = page["next"]

    assert seen == [str(job.uid) for job in reversed(jobs)]
    assert sizes == [20, 20, 5]
    assert Client().get("/jobs/").json() == {"jobs": [], "next": None}


def test_a_page_that_is_full_to_the_last_line_has_no_next(reader):
    for _ in range(20):
        reader.job()

    assert reader.client.get("/jobs/").json()["next"] is None


def test_the_list_is_one_query_and_reads_nothing_long(reader):
    for _ in range(5):
        reader.job_with_file(payload=f'"{"x" * 10_000}"')
    for headers in ({}, HTML):
        with CaptureQueriesContext(connection) as queries:
            reader.client.get("/jobs/", headers=headers)
        (own,) = [one["sql"] for one in queries if "myxo_jobs" in one["sql"]]
        for column in ('"payload"', '"traceback"', '"attempt_log"'):
            assert column not in own


def test_the_list_leads_to_pages_and_files(reader):
    job = reader.job_with_file(preferred_name="My notes.csv")
    (listed,) = reader.client.get("/jobs/").json()["jobs"]
    page = reader.client.get("/jobs/", headers=HTML).content.decode()

    assert listed["url"] == f"/jobs/{job.uid}/"
    assert listed["download_url"] == f"/jobs/{job.uid}/download/"
    for shown in (f'href="/jobs/{job.uid}/"', f'href="/jobs/{job.uid}/download/"', "My notes.csv"):
        assert shown in page


@pytest.mark.parametrize("query", [{"kind": "a\0b"}, {"kind": "'"}, {"before": "a\0b"}])
def test_whatever_a_list_is_asked_for_it_answers(reader, query):
    job = reader.job()
    for address in ("/jobs/", "/own/"):
        for headers in ({}, HTML):
            response = reader.client.get(address, query, headers=headers)
            assert response.status_code == 200
            assert (str(job.uid) in response.content.decode()) == (
                "before" in query and address == "/jobs/"
            )


def test_a_list_can_be_of_one_kind(reader):
    mine, other = reader.job(), reader.job(kind="other")

    assert [job["uid"] for job in reader.client.get("/jobs/?kind=other").json()["jobs"]] == [
        str(other.uid)
    ]
    page = reader.client.get("/own/?kind=export").content.decode()
    assert str(mine.uid) in page
    assert str(other.uid) not in page


# -- pieces for a project's own views --------------------------------------------------


def test_accepted_answers_an_enqueue_with_202_and_the_document(reader):
    response = reader.client.post("/export/")
    (row,) = Job.objects.all()

    assert response.status_code == 202
    assert response["Location"] == f"/jobs/{row.uid}/"
    assert response["Retry-After"] == "1"
    assert response.json()["uid"] == str(row.uid)
    assert set(response.json()) == FIELDS


def test_accepted_sends_a_browser_to_the_page(reader):
    response = reader.client.post("/export/", headers=HTML)
    (row,) = Job.objects.all()

    assert (response.status_code, response["Location"]) == (303, f"/jobs/{row.uid}/")
    assert reader.client.get(response["Location"], headers=HTML).status_code == 200


@pytest.mark.django_db(transaction=True)
def test_ten_clicks_at_once_make_one_export_and_a_failed_one_does_not_block_the_next(reader):
    def click() -> str:
        client = Client()
        client.force_login(reader.user)
        location: str = client.post("/export/", headers=HTML)["Location"]
        return location

    assert len(set(in_threads(*[click] * 10))) == 1
    (row,) = Job.objects.all()
    cancel_job(row.uid)
    assert get_job(row.uid).status == "failed"
    assert reader.client.post("/export/").json()["status"] == "pending"
    assert Job.objects.count() == 2


def test_the_pieces_answer_for_whoever_the_project_lets_in(reader):
    job = reader.job_with_file(b"12345")

    assert Client().get(f"/own/{job.uid}/").json()["uid"] == str(job.uid)
    assert b"".join(Client().get(f"/own/{job.uid}/file/")) == b"12345"


def test_without_the_addresses_the_pieces_work_and_name_none(reader, settings):
    job = reader.job_with_file()
    settings.ROOT_URLCONF = "tests.urls"
    document = job_document(job)
    request = RequestFactory().get("/", headers=HTML)
    request.user = reader.user
    assert b"notes.csv" in status_response(request, job).content

    assert (document["download_url"], document["cancel_url"]) == (None, None)
    assert document["file"] == {"name": "notes.csv", "bytes": 9}


async def _status(user: Any, uid: object) -> Any:
    client = AsyncClient()
    await client.aforce_login(user)
    return await client.get(f"/jobs/{uid}/")


@pytest.mark.django_db(transaction=True)
def test_the_status_is_told_under_asgi_as_well(reader):
    from asgiref.sync import async_to_sync

    job = reader.job("running")
    assert async_to_sync(_status)(reader.user, job.uid).json()["uid"] == str(job.uid)


def test_a_deleted_job_is_gone_at_once(reader):
    job = reader.job("failed")
    assert delete_job(job.uid)

    assert reader.client.get(f"/jobs/{job.uid}/").status_code == 404
