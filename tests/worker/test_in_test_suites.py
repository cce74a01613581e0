"""How a project tests what it puts: in a TestCase and with pytest-django's `db`."""

from __future__ import annotations

import functools
import time

import msgspec
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, transaction
from django.test import TestCase

from myxo_jobs import GiveUp, Jobs, Retry, Run, job
from myxo_jobs.models import Job
from myxo_jobs.testing import put_jobs, run_jobs
from tests.app.jobs import CountWords
from tests.app.models import Note

jobs = Jobs()


class Step(msgspec.Struct, frozen=True):
    name: str


class Other(msgspec.Struct, frozen=True):
    name: str


class TestOfAProject(TestCase):
    """Each of its tests starts with an empty queue, whatever another one put."""

    def setUp(self) -> None:
        assert not Job.objects.exists()

    def test_a_job_put_in_a_testcase_runs_in_process_and_sees_uncommitted_rows(self):
        began = time.monotonic()
        notes = [Note.objects.create(text="one two three") for _ in range(3)]
        for note in notes:
            jobs.put(CountWords(note.pk))
        assert put_jobs() == put_jobs(CountWords) == [CountWords(note.pk) for note in notes]

        assert run_jobs() == 3
        assert list(Note.objects.values_list("words", flat=True)) == [3, 3, 3]
        assert put_jobs() == []
        assert time.monotonic() - began < 1.0

    def test_a_job_put_inside_a_block_of_a_testcase_runs_there_too(self):
        with transaction.atomic():
            note = Note.objects.create(text="one two")
            jobs.put(CountWords(note.pk))
            assert run_jobs() == 1
        note.refresh_from_db()
        assert note.words == 2

    def test_what_a_testcase_leaves_in_the_queue_goes_with_it(self):
        jobs.put(CountWords(1))
        jobs.put(CountWords(2), delay=60)

    def test_a_delayed_job_waits_unless_a_testcase_asks_for_it(self):
        note = Note.objects.create(text="one")
        jobs.put(CountWords(note.pk), delay=3600)
        assert run_jobs() == 0
        assert put_jobs() == [CountWords(note.pk)]
        assert run_jobs(delayed=True) == 1
        note.refresh_from_db()
        assert note.words == 1


@pytest.fixture
def ran(db: None) -> list[str]:
    """The names of the Steps and Others that ran, in their order."""
    ran: list[str] = []

    @job(Step, topic="suite.Step", attempts=2)
    def step(request: Step, run: Run) -> None:
        ran.append(request.name)
        Note.objects.create(text=request.name)
        if request.name == "raises":
            raise LookupError("nothing there")
        if request.name == "gives up":
            raise GiveUp("no use")
        if request.name == "tries again" and run.attempt == 1:
            raise Retry(delay=60)
        if request.name == "puts":
            jobs.put(Other("put by a job"))

    @job(Other, topic="suite.Other")
    async def other(request: Other) -> None:
        ran.append(request.name)

    return ran


def test_jobs_run_by_priority_then_in_the_order_of_their_puts_over_all_topics(ran):
    jobs.put(Step("first"))
    jobs.put(Other("second"))
    jobs.put(Step("third"))
    jobs.put(Step("urgent"), priority=5)

    assert run_jobs() == 4
    assert ran == ["urgent", "first", "second", "third"]


def test_jobs_put_by_jobs_run_too(ran):
    jobs.put(Step("puts"))

    assert run_jobs() == 2
    assert ran == ["puts", "put by a job"]


def test_only_the_topics_asked_for_run(ran):
    jobs.put(Step("step"))
    jobs.put(Other("other"))

    assert run_jobs(topics=["suite.Other"]) == 1
    assert ran == ["other"]
    assert put_jobs() == [Step("step")]


def test_what_a_handler_raises_reaches_the_test_and_leaves_the_job_as_it_was(ran):
    job_id = jobs.put(Step("raises"))
    with pytest.raises(LookupError, match="nothing there"):
        run_jobs()

    assert not Note.objects.exists()
    row = Job.objects.get(pk=job_id)
    assert (row.status, row.attempts, row.error) == ("pending", 0, "")


def test_an_error_is_recorded_instead_where_the_test_asks_for_it(ran):
    job_id = jobs.put(Step("raises"))

    assert run_jobs(raise_errors=False, delayed=True) == 2  # its attempts
    row = Job.objects.get(pk=job_id)
    assert (row.status, row.attempts) == ("failed", 2)
    assert row.error == "LookupError: nothing there"
    assert not Note.objects.exists()


def test_a_handler_that_steers_its_job_raises_nothing_into_the_test(ran):
    given_up = jobs.put(Step("gives up"))
    tried = jobs.put(Step("tries again"))

    assert run_jobs() == 2
    assert Job.objects.get(pk=given_up).status == "failed"
    assert (Job.objects.get(pk=tried).status, Job.objects.get(pk=tried).attempts) == ("pending", 1)


def test_a_handler_runs_in_a_savepoint_so_that_a_database_error_leaves_the_test_usable(db):
    @job(Step, topic="suite.Step")
    def step(request: Step) -> None:
        note = Note.objects.create(text="once")
        Note.objects.create(pk=note.pk, text="twice")

    jobs.put(Step("breaks its transaction"))
    assert run_jobs(raise_errors=False) == 1
    assert not Note.objects.exists()
    assert Job.objects.get().error.startswith("IntegrityError:")


@pytest.mark.parametrize(
    ("topics", "error", "words"),
    [
        ("suite.Step", TypeError, "list of topics"),
        ("suite.Steps", TypeError, "list of topics"),
        (["suite.Step", "suite.Steps"], ImproperlyConfigured, r"no handler for topic suite\.Steps"),
        ([], ImproperlyConfigured, "no topic is left"),
    ],
    ids=["text", "longer text", "unknown", "none"],
)
def test_topics_that_are_not_a_list_of_known_ones_are_refused(ran, topics, error, words):
    jobs.put(Step("stays"))
    with pytest.raises(error, match=words):
        run_jobs(topics=topics)
    assert ran == []


@pytest.fixture
def swallow(db: None) -> None:
    """A handler that goes on after a failed statement: what it writes cannot be kept."""

    @job(Step, topic="suite.Step", attempts=2, backoff=0)
    def step(request: Step) -> None:
        note = Note.objects.create(text="once")
        try:
            Note.objects.create(pk=note.pk, text="twice")
        except DatabaseError:
            return


def test_a_handler_that_swallows_a_failed_statement_is_recorded_as_failed(swallow):
    job_id = jobs.put(Step("swallows"))
    assert run_jobs(raise_errors=False, delayed=True) == 2  # its attempts

    row = Job.objects.get(pk=job_id)
    assert (row.status, row.attempts) == ("failed", 2)
    assert row.error.startswith("TransactionManagementError")
    assert "IntegrityError" in row.traceback
    assert not Note.objects.exists()


def test_a_failed_statement_that_a_handler_swallows_reaches_the_test(swallow):
    job_id = jobs.put(Step("swallows"))
    with pytest.raises(DatabaseError):
        run_jobs()

    row = Job.objects.get(pk=job_id)
    assert (row.status, row.attempts, row.error) == ("pending", 0, "")
    assert not Note.objects.exists()


def test_an_async_handler_behind_a_plain_decorator_reaches_the_test_as_a_type_error(db):
    async def step(request: Step) -> None:
        raise AssertionError("nobody awaits this")

    @functools.wraps(step)
    def wrapper(request: Step) -> object:
        return step(request)

    job(Step, topic="suite.Step")(wrapper)
    job_id = jobs.put(Step("not awaited"))
    with pytest.raises(TypeError, match="make the decorator's wrapper async"):
        run_jobs()
    assert Job.objects.get(pk=job_id).status == "pending"
