"""The page and the tags: how a job stands, in words, without JavaScript."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.template import engines
from django.test import Client
from django.utils.translation import gettext_lazy

from myxo_jobs.queue import uuid7
from myxo_jobs.services import JobService, register
from tests.rig import ago

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("private")]

HTML = {"Accept": "text/html"}


@pytest.fixture(autouse=True)
def export() -> Iterator[type[JobService]]:
    @register
    class Export(JobService):
        kind = "export"
        title = "Note exports"

        def process(self, job: Any) -> None: ...

    return Export


def page(reader: Any, job: Any) -> str:
    response = reader.client.get(f"/jobs/{job.uid}/", headers=HTML)
    assert response.status_code == 200
    return str(response.content.decode())


def state(reader: Any, job: Any) -> str:
    found = re.search(r'class="myxo-job-state">(.*?)</p>', page(reader, job))
    assert found
    return html.unescape(found[1])


def bar(text: str) -> str:
    found = re.search(r"<progress[^>]*>", text)
    assert found
    return found[0]


# -- words -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "columns", "words"),
    [
        ("pending", {}, "Waiting"),
        ("pending", {"attempts": 1}, "Waiting, second attempt of three"),
        ("running", {"attempts": 1}, "Running"),
        ("running", {"attempts": 3}, "Running, third attempt of three"),
        (
            "running",
            {
                "attempts": 1,
                "progress_done": 430,
                "progress_total": 1000,
                "progress_note": "writing notes",
            },
            "Writing notes, 430 of 1,000",
        ),
        ("running", {"attempts": 1, "progress_done": 1234.5}, "Running, 1,234.5"),
        (
            "running",
            {"attempts": 1, "progress_done": 11, "progress_total": 10},
            "Running, 11 of 10",
        ),
        ("running", {"attempts": 1, "updated_at": ago(119)}, "Running"),
        ("running", {"attempts": 1, "updated_at": ago(170)}, "Running, no news for 2 min"),
        ("running", {"cancelled_at": ago(1)}, "Stopping"),
        ("failed", {"reason": "cancelled", "message": "It was cancelled."}, "Cancelled"),
        ("failed", {"reason": "refused", "message": "No notes."}, "No notes."),
        ("failed", {"reason": "lost", "message": ""}, "It did not work."),
        ("done", {}, "Done"),
    ],
    ids=str,
)
def test_the_state_is_said_in_words(reader, status, columns, words):
    fresh = {"updated_at": ago(1)} if status == "running" else {}
    if "updated_at" in columns:  # made when the test was collected, perhaps long ago
        age = 170 if "no news" in words else 60
        columns = columns | {"updated_at": ago(age)}

    assert state(reader, reader.job(status, **{**fresh, **columns})) == words


def test_a_waiting_job_knows_how_many_come_before_it(reader, make_job):
    for _ in range(3):
        make_job("export", due=ago(70))
    job = reader.job("pending", due=ago(60))
    assert state(reader, job) == "Waiting, 3 before you"

    for _ in range(110):
        make_job("export", due=ago(70))
    assert state(reader, job) == "Waiting, at least 100 before you"


def test_a_done_job_tells_its_file_its_size_and_until_when(reader):
    until = datetime(2999, 3, 6, 12, tzinfo=ZoneInfo("UTC"))
    job = reader.job_with_file(b"x" * 4_404_020, preferred_name="notes.csv", expires_at=until)
    text = page(reader, job)

    assert f'href="/jobs/{job.uid}/download/">notes.csv</a>' in text
    assert "4.2\xa0MB, until March 6, 2999" in html.unescape(text)
    assert 'value="100"' in bar(text)


def test_what_lasts_less_than_a_day_has_a_time_in_the_zone_of_the_job(reader):
    job = reader.job_with_file(expires_at=ago(-3600), time_zone="America/Lima")
    local = job.expires_at.astimezone(ZoneInfo("America/Lima"))

    shown = re.search(r"until (\d+)(?::(\d+))? ([ap])\.m\.", page(reader, job))
    assert shown
    assert int(shown[1]) % 12 == local.hour % 12
    assert int(shown[2] or 0) == local.minute


def test_the_words_are_in_the_language_of_the_job(reader, export, monkeypatch):
    monkeypatch.setattr(export, "title", gettext_lazy("Yes"))
    job = reader.job_with_file(b"x" * 5000, language="de", expires_at=ago(-7 * 24 * 3600))
    text = html.unescape(page(reader, job))

    assert "<h1>Ja</h1>" in text
    assert "4,9\xa0KB" in text


# -- the part --------------------------------------------------------------------------


def test_a_bar_has_a_label_and_no_value_while_the_total_is_unknown(reader):
    unknown = page(reader, reader.job("running", progress_done=5))
    beyond = page(reader, reader.job("running", progress_done=5, progress_total=4))
    known = page(reader, reader.job("running", progress_done=1, progress_total=4))

    for text in (unknown, beyond):
        assert "value" not in bar(text)
    assert 'value="25"' in bar(known)
    name = re.search(r'id="([^"]+)"', bar(known))
    assert name
    assert f'for="{name[1]}"' in known
    assert 'role="status"' in known


@pytest.mark.parametrize("status", ["pending", "running", "done", "failed"])
def test_a_page_follows_without_javascript_while_there_is_something_to_follow(reader, status):
    text = page(reader, reader.job(status))
    is_open = status in ("pending", "running")

    assert ('<noscript><meta http-equiv="refresh"' in text) == is_open
    assert ('method="post"' in text) == is_open
    assert ("csrfmiddlewaretoken" in text) == is_open
    assert (" hidden" in bar(text)) == (status == "failed")


def test_nothing_in_a_page_is_inline(reader):
    for job in (reader.job("running"), reader.job_with_file()):
        for address in (f"/jobs/{job.uid}/", "/jobs/", f"/own/?uid={job.uid}&kind=export"):
            text = reader.client.get(address, headers=HTML).content.decode()
            assert "<style" not in text
            assert not re.search(r"\s(style|on\w+)=", text)
            assert all("src=" in script for script in re.findall(r"<script[^>]*>", text))
            assert not re.search(r"<script[^>]*>[^<]", text)


def test_a_nonce_of_the_project_is_on_the_script(reader, rf):
    from django.template import RequestContext

    request = rf.get("/")
    request.user = reader.user
    source = "{% load myxo_jobs %}{% job_progress uid %}"
    template = engines["django"].from_string(source).template
    values = {"uid": str(reader.job("running").uid), "csp_nonce": "abc"}

    assert 'nonce="abc"' in template.render(RequestContext(request, values))


def test_the_part_stands_in_a_page_of_the_project(reader):
    job = reader.job("running", progress_done=1, progress_total=4, progress_note="<b>x</b>")
    text = reader.client.get(f"/own/?uid={job.uid}").content.decode()

    assert "Note exports</label>" in text
    assert "&lt;b&gt;x&lt;/b&gt;, 1 of 4" in text
    assert 'value="25"' in bar(text)
    assert f'action="/jobs/{job.uid}/cancel/"' in text
    assert "services.js" in text


def test_a_uid_that_is_unknown_or_not_the_readers_renders_not_available(reader, another):
    job, expired = reader.job("running"), reader.job(expires_at=ago(1))
    for client, uid in (
        (another.client, job.uid),
        (Client(), job.uid),
        (reader.client, uuid7()),
        (reader.client, "x"),
        (reader.client, expired.uid),
    ):
        text = client.get(f"/own/?uid={uid}").content.decode()
        assert "Not available" in text
        assert "<progress" not in text


@pytest.mark.parametrize(
    ("then", "kept"),
    [
        ("/reports/", True),
        ("reports/?a=1", True),
        ("http://testserver/x/", True),
        ("https://example.org/", False),
        ("//example.org/", False),
        ("javascript:alert(1)", False),
        ("/\\example.org", False),
    ],
)
def test_then_is_a_place_on_the_same_site(reader, then, kept):
    job = reader.job("running")
    text = html.unescape(
        reader.client.get("/own/", {"uid": str(job.uid), "then": then}).content.decode()
    )

    assert (f'data-then="{then}"' in text) == kept
    assert kept or then not in text


def test_a_done_job_leads_on_without_javascript(reader):
    text = reader.client.get(f"/own/?uid={reader.job().uid}&then=/jobs/").content.decode()

    assert '<a href="/jobs/">' in text
    assert '<noscript><meta http-equiv="refresh" content="0; url=/jobs/"></noscript>' in text


def test_a_tag_without_a_request_says_what_it_needs(reader):
    source = "{% load myxo_jobs %}{% job_progress uid %}"
    with pytest.raises(ImproperlyConfigured, match=r"context_processors\.request"):
        engines["django"].from_string(source).render({"uid": str(reader.job().uid)})


def test_the_script_has_no_text_of_its_own():
    from tests.rig import ROOT

    script = (ROOT / "myxo_jobs/static/myxo_jobs/services.js").read_text()
    code = re.sub(r"//.*", "", script)
    texts = re.findall(r'"([^"]*)"', code)

    assert texts
    assert [text for text in texts if " " in text and text != "use strict"] == []
    assert "innerHTML" not in code
