"""A worker sees what was committed, and nothing else."""

from __future__ import annotations

import time

import msgspec
import pytest
from django.contrib import admin
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path

from myxo_jobs import Jobs, job
from myxo_jobs.models import Job
from tests.app.models import Note
from tests.rig import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "worker.ReadNote"
jobs = Jobs()


class ReadNote(msgspec.Struct, frozen=True):
    text: str


@pytest.fixture
def read() -> list[tuple[str, float, bool]]:
    """What the handler of ReadNote met: the note's text, when, and whether the note was there."""
    read: list[tuple[str, float, bool]] = []

    @job(ReadNote, topic=TOPIC)
    def read_note(request: ReadNote) -> None:
        at = time.monotonic()
        read.append((request.text, at, Note.objects.filter(text=request.text).exists()))

    return read


def put_with_note(text: str) -> None:
    Note.objects.create(text=text)
    jobs.put(ReadNote(text))


@transaction.atomic
def put_and_raise(text: str) -> None:
    put_with_note(text)
    raise RuntimeError("after the put")


# -- what a site does with a put ----------------------------------------------


def view_that_fails(request: HttpRequest) -> HttpResponse:
    put_with_note("of the view")
    raise RuntimeError("after the put")


class FailingNoteAdmin(admin.ModelAdmin):
    fields = ("text",)

    def save_model(self, request, note, form, change):
        super().save_model(request, note, form, change)
        jobs.put(ReadNote(note.text))
        raise RuntimeError("after the save")


site = admin.AdminSite(name="failing")
site.register(Note, FailingNoteAdmin)
urlpatterns = [path("admin/", site.urls), path("view/", view_that_fails)]


def assert_only_the_next_job_runs(read: list[tuple[str, float, bool]]) -> None:
    """A later job of the topic runs, so that whatever came before it would have run, too."""
    assert not Job.objects.exists()
    put_with_note("the next one")
    wait_until(lambda: read, because="the next job runs")
    wait_until(lambda: not Job.objects.exists(), because="the queue is empty")
    assert [text for text, _, _ in read] == ["the next one"]


# -- the promises -------------------------------------------------------------


def test_a_job_put_in_a_long_transaction_starts_after_its_commit_and_sees_its_data(worker, read):
    running = worker(topics=[TOPIC])
    with transaction.atomic():
        put_with_note("of the long transaction")
        # Longer than SQLite's writers wait for each other by default.
        time.sleep(6.0)
        assert read == []
        committed = time.monotonic()

    wait_until(lambda: read, because="the job starts after the commit")
    text, at, note_was_there = read[0]
    assert (text, note_was_there) == ("of the long transaction", True)
    assert 0 <= at - committed < 3.0
    wait_until(lambda: not Job.objects.exists(), because="the job is done")

    put_with_note("of a short one")
    wait_until(lambda: len(read) == 2, because="the worker takes new jobs", within=3.0)
    running.stop()


def test_a_job_put_in_a_block_that_raises_never_runs(worker, read):
    worker(topics=[TOPIC])
    with pytest.raises(RuntimeError, match="after the put"):
        put_and_raise("of the block")

    assert_only_the_next_job_runs(read)


def test_a_job_put_before_a_savepoint_that_rolls_back_runs_and_one_put_in_it_does_not(worker, read):
    worker(topics=[TOPIC])
    with transaction.atomic():
        put_with_note("before")
        with pytest.raises(RuntimeError, match="after the put"):
            put_and_raise("in the savepoint")
        put_with_note("after")

    wait_until(lambda: len(read) == 2, because="both committed jobs run")
    wait_until(lambda: not Job.objects.exists(), because="the queue is empty")
    assert [text for text, _, _ in read] == ["before", "after"]


def test_a_job_put_by_a_view_that_fails_under_atomic_requests_never_runs(
    worker, read, client, settings, monkeypatch
):
    settings.ROOT_URLCONF = __name__
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    client.raise_request_exception = False
    worker(topics=[TOPIC])

    assert client.get("/view/").status_code == 500
    assert not Note.objects.exists()
    assert_only_the_next_job_runs(read)


def test_a_job_put_by_an_admin_save_that_raises_never_runs(worker, read, admin_client, settings):
    settings.ROOT_URLCONF = __name__
    admin_client.raise_request_exception = False
    worker(topics=[TOPIC])

    assert admin_client.post("/admin/notes/note/add/", {"text": "mine"}).status_code == 500
    assert not Note.objects.exists()
    assert_only_the_next_job_runs(read)
