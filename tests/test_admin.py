"""The admin: what staff see, what they may do, and how fast at 300,000 rows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from myxo_jobs import Jobs, job
from myxo_jobs.admin import jobs as jobs_admin
from myxo_jobs.admin import lookups
from myxo_jobs.databases import database_of
from myxo_jobs.models import Job
from tests.app.jobs import Work
from tests.rig import ago, wait_until

pytestmark = pytest.mark.django_db

LIST = "/admin/myxo_jobs/job/"
MARKUP = "<script>alert('x')</script><b>\"&"

# Puts jobs one every ten seconds up to now: 2 of 100 have failed, 30 topics wait.
MANY = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
INSERT INTO myxo_jobs (topic, payload, key, attempts, failed, error, traceback, due, created_at)
SELECT 'notes.T' || (i % 30), '{payload}', 'key ' || i,
    CASE WHEN i % 50 = 0 THEN 10 ELSE 0 END, i % 50 = 0,
    CASE WHEN i % 50 = 0 THEN 'ValueError: {payload}' ELSE '' END,
    CASE WHEN i % 50 = 0 THEN '{traceback}' ELSE '' END, {moment}, {moment}
FROM n
"""


def make_many(count: int) -> None:
    moment = database_of(connection).after(f"((i - {count}) * 10)")
    with connection.cursor() as cursor:
        cursor.execute(
            MANY.format(count=count, payload="p" * 200, traceback="t" * 2_000, moment=moment)
        )
        cursor.execute("ANALYZE myxo_jobs")


@pytest.fixture
def staff() -> Callable[..., Client]:
    """Sign in a member of staff who may do these things to jobs: view, change, delete."""

    def sign_in(*verbs: str) -> Client:
        user = User.objects.create_user("-".join(["staff", *verbs]), is_staff=True)
        names = [f"{verb}_job" for verb in verbs]
        user.user_permissions.set(Permission.objects.filter(codename__in=names))
        client = Client(enforce_csrf_checks=False)
        client.force_login(user)
        return client

    return sign_in


def page(client: Client, path: str = LIST, **query: Any) -> str:
    response = client.get(path, query)
    assert response.status_code == 200, response
    return response.content.decode()


def act(client: Client, action: str, *jobs: Job, path: str = LIST, **fields: Any) -> Any:
    ids = [row.pk for row in jobs]
    return client.post(path, {"action": action, ACTION_CHECKBOX_NAME: ids, **fields}, follow=True)


def discard(client: Client, *jobs: Job, **fields: Any) -> Any:
    """Discard jobs as a person does: choose the action, then say yes on the next page."""
    asked = act(client, "discard", *jobs, **fields)
    assert "Discard jobs?" in asked.content.decode()
    return act(client, "discard", *jobs, post="yes", **fields)


def messages_of(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]]


def listed(html: str) -> list[int]:
    """Return the numbers of the jobs in a list's rows, from the top."""
    return [int(number) for number in re.findall(r'/job/(\d+)/change/[^"]*">\d+</a>', html)]


def change_url(row: Job) -> str:
    return reverse("admin:myxo_jobs_job_change", args=[row.pk])


def listed_in(seconds: float, client: Client, **query: str) -> list[int]:
    """Return the ids of a page that comes in so many seconds, at the first of three tries."""
    for _ in range(3):
        started = time.perf_counter()
        ids = listed(page(client, **query))
        taken = time.perf_counter() - started
        if taken < seconds:
            return ids
    raise AssertionError(f"it took {taken:.3f} s, and before that no less than {seconds:g} s")


# -- who may what -------------------------------------------------------------


def test_staff_who_may_only_view_see_jobs_and_get_no_action(staff, make_job):
    failed = make_job(status="failed")
    client = staff("view")

    assert listed(page(client)) == [failed.pk]
    for html in (page(client), page(client, change_url(failed))):
        assert 'name="action"' not in html
        assert 'value="retry"' not in html
        assert 'value="discard"' not in html


@pytest.mark.parametrize("action", ["retry", "discard", "delete_selected"])
def test_a_hand_made_post_of_staff_who_may_only_view_is_refused(staff, make_job, action):
    failed = make_job(status="failed")

    response = act(staff("view"), action, failed, post="yes")

    assert response.status_code == 403
    failed.refresh_from_db()
    assert failed.status == "failed"
    assert not LogEntry.objects.exists()


def test_staff_who_may_change_jobs_retry_them_and_cannot_discard_them(staff, make_job):
    failed = make_job(status="failed")
    client = staff("change")

    assert discard_is_refused(client, failed)
    response = act(client, "retry", failed)

    assert messages_of(response) == ["Retried 1 job."]
    failed.refresh_from_db()
    assert (failed.status, failed.attempts) == ("pending", 0)


def discard_is_refused(client: Client, row: Job) -> bool:
    assert 'value="discard"' not in page(client)
    assert act(client, "discard", row, post="yes").status_code == 403
    return Job.objects.filter(pk=row.pk).exists()


def test_staff_who_may_delete_jobs_discard_them_and_cannot_retry_them(staff, make_job):
    failed = make_job(status="failed")
    client = staff("view", "delete")

    assert act(client, "retry", failed).status_code == 403
    response = discard(client, failed)

    assert messages_of(response) == ["Discarded 1 job."]
    assert not Job.objects.exists()


def test_staff_without_permission_for_jobs_see_none(staff, make_job):
    row = make_job()
    client = staff()

    for path in (LIST, change_url(row)):
        assert client.get(path).status_code == 403


def test_nobody_adds_edits_or_deletes_a_job_by_form(admin_client, make_job):
    row = make_job(status="failed")
    before = Job.objects.values().get()
    edited = {"topic": "notes.Other", "payload": "{}", "due_0": "", "due_1": ""}

    assert admin_client.get(f"{LIST}add/").status_code == 403
    assert admin_client.post(f"{LIST}add/", edited).status_code == 403
    assert admin_client.post(change_url(row), edited).status_code == 403
    assert admin_client.get(f"{LIST}{row.pk}/delete/").status_code == 403
    assert admin_client.post(f"{LIST}{row.pk}/delete/", {"post": "yes"}).status_code == 403
    form = Controls(page(admin_client, change_url(row)))
    assert set(form.names) <= {"csrfmiddlewaretoken", "action", ACTION_CHECKBOX_NAME}
    assert Job.objects.values().get() == before


def test_a_post_without_the_csrf_token_is_refused(admin_user, make_job):
    failed = make_job(status="failed")
    client = Client(enforce_csrf_checks=True)
    client.force_login(admin_user)

    assert act(client, "retry", failed).status_code == 403
    assert act(client, "discard", failed, post="yes").status_code == 403
    failed.refresh_from_db()
    assert failed.status == "failed"


# -- retry and discard --------------------------------------------------------


def test_a_retry_counts_only_the_jobs_that_were_failed(admin_client, make_job):
    failed = [make_job(status="failed") for _ in range(3)]
    running = make_job(status="running")

    response = act(admin_client, "retry", *failed, running)

    assert messages_of(response) == ["Retried 3 jobs; 1 was not failed."]
    assert Job.objects.filter(failed=True).count() == 0
    running.refresh_from_db()
    assert (running.status, running.attempts) == ("running", 2)


def test_a_retry_of_jobs_that_left_meanwhile_says_so(admin_client, make_job):
    gone, other = make_job(status="failed"), make_job(status="failed")
    Job.objects.filter(pk__in=[gone.pk, other.pk]).delete()

    response = act(admin_client, "retry", gone, other)

    assert messages_of(response) == ["Retried 0 jobs; 2 were not failed."]


def test_a_discard_counts_only_the_jobs_that_were_there(admin_client, make_job):
    rows = [make_job(status=status) for status in ("pending", "running", "failed")]
    gone = make_job()
    Job.objects.filter(pk=gone.pk).delete()

    response = act(admin_client, "discard", *rows, gone, post="yes")

    assert messages_of(response) == ["Discarded 3 jobs; 1 was gone already."]
    assert not Job.objects.exists()


def test_a_discard_asks_first_and_names_the_jobs(admin_client, make_job):
    row = make_job(topic="notes.Precious")

    html = act(admin_client, "discard", row).content.decode()

    assert "Jobs to discard: 1." in html
    assert f"notes.Precious {row.pk}" in html
    assert Job.objects.filter(pk=row.pk).exists()
    assert not LogEntry.objects.exists()


def test_the_answer_on_the_asking_page_discards_what_was_selected(admin_client, make_job):
    chosen, other = make_job(), make_job()
    form = Controls(act(admin_client, "discard", chosen).content.decode())

    admin_client.post(LIST, form.values)

    assert list(Job.objects.values_list("pk", flat=True)) == [other.pk]


@pytest.mark.parametrize("action", ["retry", "discard"])
def test_a_button_on_the_page_of_a_job_acts_on_it_alone(admin_client, make_job, action):
    row, other = make_job(status="failed"), make_job(status="failed")
    html = page(admin_client, change_url(row))
    assert f'name="action" value="{action}"' in html

    act(admin_client, action, row, post="yes")

    assert list(Job.objects.filter(failed=True).values_list("pk", flat=True)) == [other.pk]


def test_a_job_that_is_not_failed_has_no_retry_button(admin_client, make_job):
    assert 'value="retry"' not in page(admin_client, change_url(make_job()))


def test_each_retried_and_each_discarded_job_has_an_audit_entry(admin_client, admin_user, make_job):
    retried = [make_job(status="failed"), make_job(status="failed")]
    pending = make_job()

    act(admin_client, "retry", *retried, pending)
    discard(admin_client, pending)

    entries = LogEntry.objects.order_by("pk").values_list(
        "user", "object_id", "object_repr", "action_flag", "change_message"
    )
    assert list(entries) == [
        *(
            (admin_user.pk, str(row.pk), f"notes.Work {row.pk}", CHANGE, "Retried.")
            for row in retried
        ),
        (admin_user.pk, str(pending.pk), f"notes.Work {pending.pk}", DELETION, "Discarded."),
    ]
    assert "Retried." in page(admin_client, f"{LIST}{retried[0].pk}/history/")


def test_all_jobs_of_a_filtered_list_are_retried_across_its_pages_in_chunks(
    admin_client, make_job, monkeypatch
):
    monkeypatch.setattr(jobs_admin, "CHUNK_ROWS", 2)
    failed = [make_job(topic="notes.Mine", status="failed") for _ in range(5)]
    other = make_job(topic="notes.Other", status="failed")

    with CaptureQueriesContext(
        connection,
    ) as queries:
        response = act(
            admin_client,
            "retry",
            failed[0],
            path=f"{LIST}?topic=notes.Mine",
            select_across="1",
        )

    assert "Retried 5 jobs." in messages_of(response)
    assert list(Job.objects.filter(failed=True)) == [other]
    assert LogEntry.objects.count() == 5
    updates = [query["sql"] for query in queries if query["sql"].startswith("UPDATE myxo_jobs")]
    assert len(updates) == 3
    assert not [query for query in queries if "payload" in query["sql"]]


def test_all_jobs_of_a_filtered_list_are_discarded_across_its_pages(
    admin_client, make_job, monkeypatch
):
    monkeypatch.setattr(jobs_admin, "CHUNK_ROWS", 2)
    for _ in range(5):
        make_job(topic="notes.Mine")
    other = make_job(topic="notes.Other")
    form = Controls(
        act(
            admin_client, "discard", other, path=f"{LIST}?topic=notes.Mine", select_across="1"
        ).content.decode()
    )

    response = admin_client.post(f"{LIST}?topic=notes.Mine", form.values, follow=True)

    assert messages_of(response) == ["Discarded 5 jobs."]
    assert list(Job.objects.all()) == [other]


# -- a deleted job ------------------------------------------------------------


def test_a_waiting_job_discarded_in_the_admin_never_starts(
    transactional_db, admin_client, worker, ledger
):
    jobs = Jobs()
    discarded = Job.objects.get(pk=jobs.put(Work(name="discarded")))
    discard(admin_client, discarded)
    jobs.put(Work(name="kept"))

    worker()

    ledger_has(ledger, "end", "kept")
    assert ledger.count("begin", name="discarded") == 0


def ledger_has(ledger: Any, word: str, name: str) -> None:
    wait_until(lambda: ledger.count(word, name=name), because=f"{name} has its {word}")


@pytest.mark.parametrize("topic", ["test.Succeeding", "test.Failing"])
def test_a_running_job_discarded_in_the_admin_ends_and_is_not_created_again(
    transactional_db, admin_client, worker, caplog, topic
):
    import threading

    import msgspec

    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Wait(msgspec.Struct, frozen=True):
        pass

    @job(Wait, topic=topic, attempts=3, backoff=0.05)
    def wait(request: Wait) -> None:
        assert not started.is_set(), "it started a second time"
        started.set()
        go_on.wait(10)
        ended.set()
        if topic == "test.Failing":
            raise ValueError("after the discard")

    running = worker()
    row = Job.objects.get(pk=Jobs().put(Wait()))
    assert started.wait(10)
    discard(admin_client, row)
    caplog.clear()
    go_on.set()
    assert ended.wait(10)

    def lines() -> list[Any]:
        return [record for record in caplog.records if getattr(record, "job", None) == row.pk]

    wait_until(lines, because="the worker says that the job had gone")
    running.stop()
    assert len(lines()) == 1
    assert not Job.objects.exists()


def test_jobs_run_in_a_project_without_the_admin_its_users_and_its_filters(runjobs, ledger):
    Jobs().put(Work(name="bare"))

    bare = {"INSTALLED_APPS": ["myxo_jobs", "tests.app"], "MIDDLEWARE": [], "ROOT_URLCONF": None}
    process = runjobs("--drain", settings={**bare, "TEMPLATES": []})

    assert process.wait() == 0, process.log()
    assert ledger.count("end", name="bare") == 1


# -- text is text -------------------------------------------------------------


class Controls(HTMLParser):
    """The forms of a page: the names of their fields, and the values they would send."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.values: dict[str, list[str]] = {}
        self.feed(html.partition('id="content"')[2])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name")
        if tag in ("input", "button", "select", "textarea") and name:
            self.names.append(name)
            self.values.setdefault(name, []).append(given.get("value") or "")


class Inline(HTMLParser):
    """What a strict Content-Security-Policy would refuse."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        if tag == "style" or (tag == "script" and "src" not in names):
            self.found.append(self.get_starttag_text() or "")
        if any(name == "style" or name.startswith("on") for name in names):
            self.found.append(self.get_starttag_text() or "")
        if any((value or "").startswith("javascript:") for _, value in attrs):
            self.found.append(self.get_starttag_text() or "")


@pytest.mark.parametrize("status", ["pending", "running", "failed"])
def test_markup_in_a_job_is_shown_as_text_on_every_page(admin_client, make_job, status):
    row = make_job(
        topic=f"t{MARKUP}",
        key=f"k{MARKUP}",
        payload=f"p{MARKUP}",
        status=status,
        error=f"e{MARKUP}",
        traceback=f"b{MARKUP}",
    )
    pages = {
        "list": page(admin_client),
        "filtered": page(admin_client, topic=row.topic, q=row.key),
        "job": page(admin_client, change_url(row)),
        "asking": act(admin_client, "discard", row).content.decode(),
        "after a retry": act(admin_client, "retry", row).content.decode(),
        "history": page(admin_client, f"{LIST}{row.pk}/history/"),
        "after a discard": discard(admin_client, row).content.decode(),
        "index": page(admin_client, "/admin/"),
    }

    shown = unescape("".join(pages.values()))
    for letter in "tkpeb":
        assert f"{letter}{MARKUP}" in shown
    for name, html in pages.items():
        assert "<script>alert" not in html, name
        assert "<b>" not in html, name
        assert Inline(html).found == [], name


def test_pages_hold_under_a_strict_content_security_policy(admin_client, make_job):
    row = make_job(status="failed")

    for html in (
        page(admin_client, created_at__range__gte="2026-01-01", due__range__lte="nonsense"),
        page(admin_client, change_url(row)),
        act(admin_client, "discard", row).content.decode(),
    ):
        assert "link" in Inline(html).tags
        assert Inline(html).found == []


# -- one job ------------------------------------------------------------------


def test_the_page_of_a_job_shows_its_payload_on_lines_and_each_value_as_it_is(
    admin_client, make_job
):
    row = make_job(payload='{"amount":1.10,"big":1e400,"text":"a\\u0000\\nb"}')

    html = unescape(page(admin_client, change_url(row)))

    assert '{\n  "amount": 1.10,\n  "big": 1e400,\n  "text": "a\\u0000\\nb"\n}' in html


def test_the_page_of_a_job_shows_its_error_before_what_is_read_after_it(admin_client, make_job):
    html = page(admin_client, change_url(make_job(status="failed")))

    places = [html.index(f">{title}<") for title in ("Last failed attempt", "Request", "Moments")]
    assert places == sorted(places)


@pytest.mark.parametrize("payload", ["", "{broken", "[" * 100_000])
def test_a_payload_that_is_no_json_is_shown_as_it_is(admin_client, make_job, payload):
    row = make_job(payload=payload)

    assert payload in page(admin_client, change_url(row))


@pytest.mark.parametrize(
    ("status", "columns", "reason"),
    [
        ("failed", {}, "after 10 attempts. It stays until somebody retries or discards it."),
        ("running", {}, "A worker has claimed it."),
        ("expired", {}, "Its worker has not renewed its claim for"),
        ("pending", {"due": lambda: ago(-3650)}, "It is due in 1 hour."),
        ("pending", {"due": lambda: ago(130)}, "It has been due for 2 minutes and waits for"),
        ("pending", {"topic": "gone.Topic"}, "this site knows no handler for its topic"),
    ],
)
def test_the_page_of_a_job_says_why_it_has_its_status(
    admin_client, make_job, status, columns, reason
):
    now = {name: value() if callable(value) else value for name, value in columns.items()}
    row = make_job(status=status, **now)

    assert reason in page(admin_client, change_url(row)).replace("\xa0", " ")


# -- the list -----------------------------------------------------------------


def test_the_list_shows_each_job_in_a_line(admin_client, make_job):
    make_job(status="failed", key="note 7", error="ValueError: no\nsecond line")

    html = unescape(page(admin_client)).replace("\xa0", " ")

    assert '<span class="myxo-status myxo-failed">failed</span>' in html
    assert '<td class="field-topic_shown">notes.Work</td>' in html
    assert '<td class="field-key_shown">note 7</td>' in html
    assert ">last run 5 minutes ago</time>" in html
    assert '<td class="field-attempts_shown">10 of 10</td>' in html
    assert '<td class="field-error_line">ValueError: no</td>' in html
    assert ">1 hour ago</time>" in html
    assert "+0545" in html


def test_the_list_loads_nothing_long_and_only_the_start_of_an_error(admin_client, make_job):
    make_job(status="failed", error="e" * 2_000)

    with CaptureQueriesContext(connection) as queries:
        html = page(admin_client)

    for name in ("payload", "traceback", "result", "attempt_log", "again", "message"):
        column = f'"myxo_jobs"."{name}"'
        assert not [query for query in queries if column in query["sql"]]
    assert len(queries) < 15
    assert "e" * 100 in html
    assert "e" * 200 not in html


def test_the_list_counts_no_further_than_10_000(admin_client):
    make_many(lookups.COUNTED_ROWS + 1)

    with CaptureQueriesContext(connection) as queries:
        html = page(admin_client)
        last = page(admin_client, p=100)

    assert "10,000+ jobs" in html
    assert "Select all 10,000+ jobs" in html
    assert len(listed(last)) == 100
    counts = [query["sql"] for query in queries if "COUNT(" in query["sql"]]
    assert counts
    assert all("LIMIT 10001" in sql for sql in counts)


def test_the_list_is_ordered_by_id_alone(admin_client, make_job):
    rows = [make_job(topic=topic).pk for topic in ("b", "a", "c")]

    assert listed(page(admin_client)) == rows[::-1]
    assert listed(page(admin_client, o="1")) == rows
    assert listed(page(admin_client, o="-8")) == rows[::-1]
    for unindexed in range(2, 8):
        assert sorted(listed(page(admin_client, o=str(unindexed)))) == rows


@pytest.mark.parametrize(
    "query",
    [
        {"status": "nonsense"},
        {"topic": "a\x00b"},
        {"p": "9999"},
        {"q": "9" * 40},
        {"q": "²"},
        {"q": "a\x00b"},
        {"created_at__range__gte": "0001-01-01", "created_at__range__lte": "9999-12-31"},
        {"due__range__gte": "9999-12-31", "due__range__lte": "0001-01-01"},
        {"created_at__range__gte": "yesterday"},
    ],
)
def test_an_odd_address_of_the_list_is_no_server_error(admin_client, make_job, query):
    make_job()

    assert admin_client.get(LIST, query, follow=True).status_code == 200


def test_jobs_are_found_by_their_exact_key_and_by_their_number(admin_client, make_job):
    one = make_job(key="note 7 of ann")
    two = make_job(key="note 7")
    three = make_job(key=str(one.pk))

    assert listed(page(admin_client, q="note 7")) == [two.pk]
    assert listed(page(admin_client, q="note 7 of ann")) == [one.pk]
    assert listed(page(admin_client, q=str(two.pk))) == [two.pk]
    assert listed(page(admin_client, q=str(one.pk))) == [three.pk, one.pk]
    assert listed(page(admin_client, q="note")) == []


def test_jobs_are_filtered_by_status(admin_client, make_job):
    rows = {status: make_job(status=status).pk for status in ("pending", "running", "failed")}

    for status, job_id in rows.items():
        assert listed(page(admin_client, status=status)) == [job_id]
    assert listed(page(admin_client, status="done")) == []


def test_jobs_are_filtered_by_topic(admin_client, make_job):
    mine = make_job(topic="notes.Mine")
    make_job(topic="notes.Other")

    assert listed(page(admin_client, topic="notes.Mine")) == [mine.pk]


def test_the_topics_offered_are_those_of_handlers_of_waiting_and_of_failed_jobs(make_job):
    for _ in range(3):
        make_job(topic="gone.Waiting")
    make_job(topic="gone.Failed", status="failed")
    make_job(topic="gone.Running", status="running")

    topics = lookups.topics()

    assert topics == sorted(set(topics))
    assert {"gone.Waiting", "gone.Failed", "gone.Running", "notes.Work"} <= set(topics)


def test_a_flood_of_topics_does_not_flood_the_filter(admin_client):
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) "
            "INSERT INTO myxo_jobs (topic, payload) SELECT 'flood.' || i, '{}' FROM n"
        )

    assert len([topic for topic in lookups.topics() if topic.startswith("flood.")]) == 100
    html = page(admin_client, topic="flood.999")
    assert '<li class="selected">\n    <a href="?topic=flood.999">' in html


def test_jobs_are_filtered_by_the_date_they_were_put(admin_client, make_job):
    today = timezone.localdate()
    rows = {
        days: make_job(created_at=timezone.now() - timedelta(days=days)).pk
        for days in (9, 6, 4, 2, 0)
    }

    def put(**ends: int) -> list[int]:
        dates = {
            f"created_at__range__{end}": (today - timedelta(days=days)).isoformat()
            for end, days in ends.items()
        }
        return listed(page(admin_client, **dates))

    assert put(gte=6) == [rows[0], rows[2], rows[4], rows[6]]
    assert put(lte=4) == [rows[4], rows[6], rows[9]]
    assert put(gte=6, lte=2) == [rows[2], rows[4], rows[6]]
    assert put(gte=20, lte=15) == []


def test_jobs_are_filtered_by_the_date_they_are_due(admin_client, make_job):
    today = timezone.localdate()
    rows = [make_job(due=timezone.now() + timedelta(days=days)).pk for days in (0, 2, 5)]

    dates = {
        "due__range__gte": (today + timedelta(days=1)).isoformat(),
        "due__range__lte": (today + timedelta(days=2)).isoformat(),
    }

    assert listed(page(admin_client, **dates)) == [rows[1]]


def test_a_range_of_dates_keeps_the_other_filters_and_can_be_cleared(admin_client, make_job):
    make_job()
    html = page(
        admin_client,
        status="pending",
        topic="notes.Work",
        q="x",
        p="1",
        due__range__gte="2026-01-31",
    )
    put_form, due_form = re.findall(r'<form class="myxo-range".*?</form>', html, re.DOTALL)

    put_fields, due_fields = (
        dict(re.findall(r'name="(\S+)" value="(\S+)"', form)) for form in (put_form, due_form)
    )
    others = {"status": "pending", "topic": "notes.Work", "q": "x"}
    assert put_fields == {**others, "due__range__gte": "2026-01-31"}
    assert due_fields == {**others, "due__range__gte": "2026-01-31"}
    assert 'href="?q=x&amp;status=pending&amp;topic=notes.Work">Clear' in due_form
    assert "Clear" not in put_form
    for form in (put_form, due_form):
        labels, ids = re.findall(r'for="(\S+)"', form), re.findall(r'id="(\S+)"', form)
        assert len(labels) == 2
        assert set(labels) <= set(ids)


def test_a_date_that_is_none_is_told_beside_its_field(admin_client):
    assert "Enter a valid date." in page(admin_client, due__range__gte="31st of June")


def test_ids_found_for_a_moment_are_those_of_later_puts(make_job):
    assert lookups.first_id_put(timezone.now()) is None

    rows = [make_job(created_at=ago(100 - place)).pk for place in range(0, 100, 10)]
    Job.objects.filter(pk__in=[rows[1], rows[4], rows[5]]).delete()
    left = Job.objects.order_by("pk").values_list("pk", "created_at")

    for moment in (ago(1000), *(at for _, at in left), *(ago(95 - p) for p in range(0, 100, 10))):
        first = lookups.first_id_put(moment)
        later = [job_id for job_id, at in left if at >= moment]
        assert [job_id for job_id, _ in left if job_id >= first] == later


# -- a replica ----------------------------------------------------------------


class ReadsFromReplica:
    """Sends every read of a job to another database than its writes."""

    def db_for_read(self, model: type, **hints: Any) -> str | None:
        return "other" if model is Job else None

    def db_for_write(self, model: type, **hints: Any) -> str | None:
        return "default"


@pytest.mark.django_db(databases=["default", "other"])
def test_the_admin_shows_and_changes_the_primary_when_reads_go_to_a_replica(
    settings, admin_client, make_job
):
    failed = make_job(status="failed", key="there")
    make_job(status="failed", using="other", topic="replica.Old")
    settings.DATABASE_ROUTERS = [ReadsFromReplica()]

    html = page(admin_client)
    assert listed(html) == [failed.pk]
    assert "replica.Old" not in html
    assert listed(page(admin_client, q="there", created_at__range__gte="2020-01-01")) == [failed.pk]
    assert "ConnectionRefusedError" in page(admin_client, change_url(failed))
    response = act(admin_client, "retry", failed)
    assert messages_of(response) == ["Retried 1 job."]
    assert "pending" in page(admin_client, change_url(failed))
    discard(admin_client, failed)
    assert listed(page(admin_client)) == []
    assert Job.objects.using("other").count() == 1


# -- 300,000 rows -------------------------------------------------------------


def test_the_list_of_300_000_jobs_opens_filters_searches_and_orders_in_under_2_seconds(
    admin_client,
):
    make_many(300_000)
    oldest = Job.objects.order_by("pk")[0]
    day = (timezone.now() - timedelta(days=20)).date().isoformat()
    page(admin_client, q="nothing")  # what Django imports and compiles once

    in_time = partial(listed_in, 2, admin_client)

    assert len(in_time()) == 100
    assert len(in_time(status="failed")) == 100
    assert in_time(q="key 1") == [oldest.pk]
    assert in_time(o="1")[0] == oldest.pk
    assert len(in_time(status="failed", o="1")) == 100
    assert in_time(status="running") == []
    assert len(in_time(topic="notes.T7")) == 100
    assert len(in_time(created_at__range__gte=day, created_at__range__lte=day)) == 100
    assert len(in_time(due__range__gte=day, due__range__lte=day)) == 100
