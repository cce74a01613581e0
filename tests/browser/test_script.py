"""What the script does on a page of a project, under a strict policy, while rows change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from myxo_jobs.models import Job
from myxo_jobs.queue import uuid7
from tests.browser.conftest import Browser
from tests.rig import ROOT, ago, make_job, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LISTEN = """
window.told = [];
for (const name of ["job:progress", "job:done", "job:failed"])
  document.body.addEventListener(name, (event) => window.told.push([name, event.detail]));
"""
ASKED = (
    "return performance.getEntriesByType('resource')"
    ".filter((one) => one.name.includes('/jobs/') && one.name.includes(arguments[0])).length"
)
HIDE = """
Object.defineProperty(document, "hidden", {value: arguments[0], configurable: true});
document.dispatchEvent(new Event("visibilitychange"));
"""


@pytest.fixture
def reader(
    settings: Any,
    live_server: Any,
    django_user_model: Any,
    open_browser: Callable[..., Browser],
) -> Browser:
    """A browser of a signed-in user, before a project that includes the addresses."""
    settings.ROOT_URLCONF = "tests.services.addresses"
    settings.MIDDLEWARE = ["example_project.strict_csp.StrictCsp", *settings.MIDDLEWARE]
    user = django_user_model.objects.create_user("ada")
    client = Client()
    client.force_login(user)
    browser = open_browser(live_server.url)
    session = {"name": "sessionid", "value": client.cookies["sessionid"].value}

    def sign_in() -> bool:
        browser.driver.add_cookie(session)
        browser.open("/own/?kind=export")
        kept = browser.driver.get_cookie("sessionid")
        return kept is not None and kept["value"] == session["value"]

    browser.wait_for(sign_in, "signed in")
    return browser


@pytest.fixture
def job(django_user_model: Any, reader: Browser) -> Callable[..., Job]:
    user = django_user_model.objects.get()

    def make(status: str = "running", **columns: Any) -> Job:
        owner = {"owner_kind": "auth.user", "owner_id": str(user.pk), "uid": uuid7()}
        return make_job("export", status=status, **{"created_at": ago(1), **owner, **columns})

    return make


@pytest.fixture(autouse=True)
def static_files(settings: Any) -> None:
    settings.STATIC_ROOT = str(ROOT / "myxo_jobs" / "static")
    settings.STATIC_URL = "/static/"


def change(job: Job, **columns: Any) -> None:
    assert Job.objects.filter(pk=job.pk).update(**columns) == 1


def told(browser: Browser) -> list[tuple[str, Any]]:
    return [tuple(one) for one in browser.run("return window.told")]


def asked(browser: Browser, job: Job) -> int:
    return int(browser.run(ASKED, str(job.uid)))


def asks_no_more(browser: Browser, job: Job) -> bool:
    browser.pause(700)  # for what was under way
    before = asked(browser, job)
    browser.pause(1800)  # it would ask after a second
    return asked(browser, job) == before


def test_a_bar_follows_its_job_tells_the_page_and_stops_at_the_end(reader, job):
    row = job(progress_done=1, progress_total=10, progress_note="Writing")
    reader.open(f"/own/?uid={row.uid}")
    reader.run(LISTEN)
    assert "Writing, 1 of 10" in reader.text(".myxo-job-state")
    change(row, progress_done=5)
    reader.wait_for_state("5 of 10")
    assert told(reader)[-1][0] == "job:progress"
    change(row, progress_done=11)
    reader.wait_for_state("11 of 10")
    assert not reader.run("return document.querySelector('progress').hasAttribute('value')")

    change(row, due=None, worker="", expires_at=ago(-600), completed_at=ago(0))
    reader.wait_for_state("Done")
    name, document = told(reader)[-1]
    assert (name, document["status"], document["uid"]) == ("job:done", "done", str(row.uid))
    assert reader.all("[role=status]")[0].get_attribute("textContent") == "Done"
    assert asks_no_more(reader, row)
    assert reader.complaints() == []


def test_two_bars_on_a_page_are_followed_each_for_itself(reader, job):
    one, other = job(progress_done=1, progress_total=4), job(progress_done=1, progress_total=2)
    reader.open(f"/own/?uid={one.uid}&other={other.uid}")
    reader.run(LISTEN)
    change(one, due=None, worker="", expires_at=ago(-600))
    change(other, failed=True, worker="", reason="refused", message="No.", expires_at=ago(-600))
    reader.wait_for_state("Done No.")

    ends = {(name, document["uid"]) for name, document in told(reader) if name != "job:progress"}
    assert ends == {("job:done", str(one.uid)), ("job:failed", str(other.uid))}
    assert len([name for name, _ in told(reader) if name != "job:progress"]) == 2, "each once"


def test_a_bar_says_when_the_site_is_away_and_waits_longer_each_time(reader, job):
    row = job()
    reader.open(f"/own/?uid={row.uid}")
    away = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    reader.driver.execute_cdp_cmd("Network.enable", {})
    reader.driver.execute_cdp_cmd("Network.emulateNetworkConditions", away)
    reader.wait_for_state("No connection. Trying again.")
    reader.driver.execute_cdp_cmd("Network.disable", {})
    reader.wait_for_state("Running")


def test_a_job_that_is_gone_is_said_to_be_and_asked_for_no_more(reader, job):
    row = job()
    reader.open(f"/own/?uid={row.uid}")
    Job.objects.all().delete()
    reader.wait_for_state("Not available")

    assert asks_no_more(reader, row)
    assert not reader.all("progress")[0].is_displayed()


def test_a_hidden_page_rests_and_asks_at_once_on_return(reader, job):
    row = job()
    reader.open(f"/own/?uid={row.uid}")
    reader.wait_for(lambda: asked(reader, row), "it asks")
    reader.run(HIDE, True)
    assert asks_no_more(reader, row)

    before = asked(reader, row)
    reader.run(HIDE, False)
    reader.wait_for(lambda: asked(reader, row) > before, "it asks again")


def test_a_page_goes_on_when_its_job_is_done_and_only_on_its_own_site(reader, job):
    row, done = job(), job("done", result=None)
    reader.open(f"/own/?uid={row.uid}&then=/jobs/")
    change(row, due=None, worker="", expires_at=ago(-600))
    reader.wait_for(lambda: reader.driver.current_url == f"{reader.address}/jobs/", "it went on")

    for then in ("https://example.org/", "//example.org/", "javascript:alert(1)"):
        reader.open(f"/own/?uid={done.uid}&then={then}")
        assert "Done" in reader.text(".myxo-job-state")
        assert "example.org" not in reader.run("return document.querySelector('main').innerHTML")
        assert "alert" not in reader.run("return document.querySelector('main').innerHTML")


def test_what_people_and_services_have_written_is_shown_and_not_run(reader, job):
    evil = "<img src=x onerror=alert(1)>\x1b[31m{{ 7|add:7 }}"
    row = job(progress_note=evil, created_at=ago(1))
    reader.open(f"/own/?uid={row.uid}&kind=export")
    assert evil.replace("\x1b", "") in reader.text(".myxo-job-state").replace("\x1b", "")
    change(row, failed=True, worker="", reason="refused", message=evil, expires_at=ago(-600))
    wait_until(lambda: reader.all("[data-status=failed]"), because="it failed", within=60)

    assert "<img" in reader.text(".myxo-job-state")
    assert reader.all("main img") == []
    assert reader.complaints() == []
