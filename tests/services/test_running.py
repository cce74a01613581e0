"""What a service's code is given, and what its owner and its operator are told of the end."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone, translation
from django.utils.translation import gettext, gettext_lazy

from myxo_jobs import GiveUp, Jobs, Snooze
from myxo_jobs.handlers import Dials
from myxo_jobs.models import Job, ServiceSettings
from myxo_jobs.services import (
    JobService,
    cancel_job,
    enqueue,
    get_job,
    register,
)
from myxo_jobs.services.dials import dials
from myxo_jobs.services.rows import ServiceJob
from myxo_jobs.testing import run_jobs
from tests.app.models import Note
from tests.rig import ROOT, ago, process_environment, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()

Process = Callable[[JobService, ServiceJob], Any]


def service(process: Process, **attributes: Any) -> None:
    """Register a service of kind `export`."""
    defaults = {"kind": "export", "backoff": 0.05, "process": process}
    register(type("Export", (JobService,), {**defaults, **attributes}))


# -- what process is given -------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_process_gets_the_job_and_what_it_returns_is_the_result(worker, ended, is_async):
    seen: list[Any] = []

    def process(self: JobService, job: ServiceJob) -> dict[str, int]:
        for _ in job.track(range(3)):
            pass
        job.progress(2, 4, "half")
        job.extend(60)
        seen.append((str(job.uid), job.payload, job.status, job.owner_id, job.attempt))
        seen.append((job.max_attempts, job.should_stop, job.cancelled))
        return {"item_count": 3, "bytes_in": 10, "bytes_out": 4, "pages": 2}

    async def process_async(self: JobService, job: ServiceJob) -> dict[str, int]:
        await asyncio.sleep(0)
        return process(self, job)

    service(process_async if is_async else process)
    worker(topics=["export"])
    uid = enqueue("export", {"a": 1}, "auth.user", "7")
    job = ended(uid)

    assert (job.status, job.error) == ("done", "")
    assert job.result == {"item_count": 3, "bytes_in": 10, "bytes_out": 4, "pages": 2}
    assert (job.item_count, job.bytes_in, job.bytes_out) == (3, 10, 4)
    assert (job.progress_done, job.progress_total, job.progress_note) == (2, 4, "half")
    assert seen == [(uid, {"a": 1}, "running", "7", 1), (3, False, False)]


@pytest.mark.parametrize("arguments", [("x",), (None,), (1, "2"), ([],)], ids=repr)
def test_a_progress_that_is_no_number_is_a_type_error_that_shows_it(ended, arguments):
    service(lambda self, job: job.progress(*arguments), attempts=1)
    uid = enqueue("export", {})
    run_jobs(raise_errors=False)

    assert ended(uid).error.startswith("TypeError: progress takes numbers, not ")
    assert repr(arguments[-1]) in ended(uid).error


def test_a_payload_type_is_what_process_gets(worker, ended):
    class Order(msgspec.Struct):
        note_id: int

    service(lambda self, job: {"id": job.payload.note_id}, payload_type=Order)
    worker(topics=["export"])

    assert ended(enqueue("export", {"note_id": 7})).result == {"id": 7}


@pytest.mark.parametrize(
    ("returned", "result"),
    [(None, None), ([1, 2], [1, 2]), ("x", "x"), ({"item_count": None}, {"item_count": None})],
    ids=repr,
)
def test_whatever_json_has_can_be_the_result(ended, returned, result):
    service(lambda self, job: returned)
    uid = enqueue("export", {})
    run_jobs()
    job = ended(uid)

    assert (job.status, job.result, job.item_count) == ("done", result, None)


@dataclass(frozen=True)
class Measured:
    size: float


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"item_count": "3"}, "item_count"),
        ({"bytes_in": -1}, "bytes_in"),
        ({"bytes_out": True}, "bytes_out"),
        ({"file": "notes.csv"}, "file"),
        ({"file": []}, "file"),
        ({"a": object()}, r"$['a']"),
        ({"a": [None, {"b": float("nan")}]}, r"$['a'][1]['b']: JSON has no nan"),
        (float("-inf"), r"at $: JSON has no -inf"),
        ({"a": {float("inf")}}, r"$['a'][0]: JSON has no inf"),
        ({"a": Measured(float("nan"))}, r"$['a'].size: JSON has no nan"),
    ],
    ids=repr,
)
def test_a_result_that_cannot_be_is_refused_at_once_naming_its_place(ended, returned, named):
    service(lambda self, job: returned)
    uid = enqueue("export", {})
    run_jobs(raise_errors=False)
    job = ended(uid)

    assert (job.status, job.attempts, job.reason) == ("failed", 1, "error")
    assert job.error.startswith("ResultInvalid: ")
    assert named in job.error


def test_the_language_and_the_zone_of_the_put_are_those_of_the_run(worker, ended):
    seen: list[tuple[str, str]] = []

    def note(self: JobService, job: ServiceJob, *error: object) -> str:
        seen.append((translation.get_language(), timezone.get_current_timezone_name()))
        return gettext("Yes")

    def process(self: JobService, job: ServiceJob) -> None:
        note(self, job)
        raise ValueError("no")

    service(process, attempts=1, explain=note, finished=note)
    worker(topics=["export"])
    with translation.override("de"), timezone.override("America/Lima"):
        uid = enqueue("export", {})
    job = ended(uid)
    wait_until(lambda: len(seen) == 3, because="process, explain and finished ran", within=30)

    assert seen == [("de", "America/Lima")] * 3
    assert job.message == "Ja"


def test_only_the_job_that_process_was_given_runs(worker):
    service(lambda self, job: None)
    job = get_job(enqueue("export", {}))

    assert not job.cancelled
    for use in (lambda: job.progress(1), lambda: job.file("a"), lambda: job.should_stop):
        with pytest.raises(RuntimeError, match="only the job that process"):
            use()


def test_a_decoded_row_saves_its_plain_columns_alone():
    service(lambda self, job: None)
    job = get_job(enqueue("export", {"a": 1}))
    job.preferred_name = "x.csv"
    job.save(update_fields=["preferred_name"])

    assert Job.objects.get().preferred_name == "x.csv"
    with pytest.raises(TypeError, match="decoded"):
        job.save()
    assert Job.objects.get().payload == '{"a":1}'
    job.refresh_from_db()
    assert job.payload == {"a": 1}


@pytest.mark.parametrize("in_a_block", [False, True], ids=["plain", "atomic"])
def test_others_see_that_it_runs_while_process_is_in_a_transaction_or_not(worker, in_a_block):
    go_on = threading.Event()

    def process(self: JobService, job: ServiceJob) -> None:
        if in_a_block:
            with transaction.atomic():
                go_on.wait(20)
                Note.objects.create(text="x")
        else:
            go_on.wait(20)

    service(process)
    worker(topics=["export"])
    uid = enqueue("export", {})
    wait_until(lambda: get_job(uid).status == "running", because="it runs", within=30)
    go_on.set()


# -- failures ------------------------------------------------------------------------


def test_the_owner_gets_a_sentence_without_the_exceptions_text(worker, ended):
    def process(self: JobService, job: ServiceJob) -> None:
        raise ValueError("secret")

    service(process, attempts=2)
    worker(topics=["export"])
    uid = enqueue("export", {})
    job = ended(uid)

    assert (job.status, job.attempts, job.reason) == ("failed", 2, "error")
    assert uid[-12:] in job.message
    assert "did not work" in job.message
    assert "secret" not in job.message
    assert job.error == "ValueError: secret"
    assert "secret" in job.traceback


def test_what_a_service_gives_up_with_is_the_message_as_it_stands(worker, ended):
    def process(self: JobService, job: ServiceJob) -> None:
        raise GiveUp(gettext_lazy("Yes") if job.payload == "lazy" else "There are no notes.")

    service(process)
    worker(topics=["export"])
    job = ended(enqueue("export", {}))

    assert (job.attempts, job.reason, job.message) == (1, "refused", "There are no notes.")
    assert ended(enqueue("export", "lazy", language="de")).message == "Ja"


def test_explain_is_asked_with_what_was_raised(worker, ended):
    seen: list[Any] = []

    def explain(self: JobService, job: ServiceJob, error: BaseException) -> str:
        seen.append((job.payload, type(error)))
        return "The shop is closed."

    def process(self: JobService, job: ServiceJob) -> None:
        raise LookupError

    service(process, attempts=1, explain=explain)
    worker(topics=["export"])

    assert ended(enqueue("export", {"a": 1})).message == "The shop is closed."
    assert seen == [({"a": 1}, LookupError)]


def exits(self: JobService, job: ServiceJob, error: BaseException) -> str:
    raise SystemExit


def asks_wrongly(self: JobService, job: ServiceJob, error: BaseException) -> str:
    connection.cursor().execute("SELECT no_such_column")
    raise AssertionError


def asks_wrongly_and_goes_on(self: JobService, job: ServiceJob, error: BaseException) -> str:
    with suppress(DatabaseError):
        connection.cursor().execute("SELECT no_such_column")
    return ""


@pytest.mark.parametrize("explain", [exits, asks_wrongly, asks_wrongly_and_goes_on])
@pytest.mark.parametrize("cancels", [False, True], ids=["failed", "cancelled"])
def test_whatever_explain_does_the_job_has_failed_and_its_owner_gets_the_usual_sentence(
    worker, ended, caplog, explain, cancels
):
    def process(self: JobService, job: ServiceJob) -> None:
        raise LookupError

    service(process, attempts=1, explain=explain)
    with caplog.at_level(logging.ERROR, logger="myxo_jobs"):
        uid = enqueue("export", {})
        if cancels:
            with transaction.atomic():
                assert cancel_job(uid) == "failed"
        else:
            worker(topics=["export"])
        job = ended(uid)

    assert ("cancelled" if cancels else "did not work") in job.message
    told = [record.getMessage() for record in caplog.records]
    if explain is not asks_wrongly_and_goes_on:
        assert any("explain failed" in line for line in told)


def test_a_stored_payload_that_cannot_be_read_fails_at_once(worker, ended, make_job):
    class Order(msgspec.Struct):
        note_id: int

    cleaned: list[object] = []
    service(
        lambda self, job: None,
        payload_type=Order,
        cleanup=lambda self, job: cleaned.append(job.payload),
    )
    uid = enqueue("export", {"note_id": 1})
    Job.objects.update(payload='{"note_id":"one"}')
    worker(topics=["export"])
    job = ended(uid)

    assert (job.status, job.attempts, job.reason) == ("failed", 1, "error")
    assert "note_id" in job.error
    assert "note_id" not in job.message
    assert cleaned == [{"note_id": "one"}]


def test_a_run_that_exits_is_a_failed_attempt(worker, ended):
    cleaned: list[str] = []

    def process(self: JobService, job: ServiceJob) -> None:
        raise SystemExit(3)

    service(process, attempts=2, cleanup=lambda self, job: cleaned.append(str(job.uid)))
    worker(topics=["export"])
    uid = enqueue("export", {})

    assert (ended(uid).status, ended(uid).attempts) == ("failed", 2)
    assert cleaned == [uid]


def test_a_run_that_takes_too_long_has_failed_by_its_timeout(worker, ended):
    async def process(self: JobService, job: ServiceJob) -> None:
        await asyncio.sleep(60)

    service(process, attempts=1, job_timeout_seconds=0.3)
    worker(topics=["export"])
    job = ended(enqueue("export", {}))

    assert (job.reason, job.error[:10]) == ("timeout", "JobTimeout")
    assert "did not work" in job.message


def test_a_failed_job_gives_up_its_key_and_expires(worker, ended):
    def process(self: JobService, job: ServiceJob) -> None:
        raise ValueError

    service(process, attempts=1, retention_seconds=3600)
    worker(topics=["export"])
    first = enqueue("export", {}, key="all")
    job = ended(first)

    assert job.key is None
    assert job.expires_at - job.completed_at == timedelta(hours=1)
    assert enqueue("export", {}, key="all") != first


def test_a_cancelled_job_that_is_retried_is_cancelled_no_more(ended):
    seen: list[bool] = []
    service(lambda self, job: seen.append(job.cancelled))
    uid = enqueue("export", {})
    assert cancel_job(uid) == "failed"
    assert get_job(uid).cancelled
    assert jobs.retry(get_job(uid).pk)

    assert not get_job(uid).cancelled
    run_jobs()
    assert (ended(uid).status, ended(uid).cancelled, seen) == ("done", False, [False])


def test_a_retry_by_an_operator_starts_a_new_life(worker, ended):
    def process(self: JobService, job: ServiceJob) -> dict[str, int]:
        if not mended:
            raise ValueError
        return {"item_count": 1}

    mended: list[bool] = []
    service(process, attempts=1)
    worker(topics=["export"])
    uid = enqueue("export", {})
    failed = ended(uid)
    mended.append(True)
    assert jobs.retry(failed.pk)
    job = wait_until(
        lambda: get_job(uid) if get_job(uid).status == "done" else None,
        because="it is mended",
        within=30,
    )

    assert (job.attempts, job.reason, job.message, job.result) == (1, None, None, {"item_count": 1})


# -- the end is told -------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_finished_is_called_once_the_outcome_stands(worker, ended, settings, fails, is_async):
    settings.ROOT_URLCONF = "tests.services.addresses"
    settings.MYXO_JOBS = {"base_url": "https://example.org/"}
    told: list[Any] = []

    def process(self: JobService, job: ServiceJob) -> dict[str, int]:
        if fails:
            raise GiveUp("No notes.")
        return {"item_count": 3}

    def finished(self: JobService, job: ServiceJob) -> None:
        told.append((str(job.uid), job.status, job.result, job.message, job.url))
        if len(told) < 3:
            raise ConnectionError("the mail server is down")

    async def finished_async(self: JobService, job: ServiceJob) -> None:
        finished(self, job)

    service(process, finished=finished_async if is_async else finished)
    worker(topics=["export"])
    uid = enqueue("export", {})
    outcome = ("failed", None, "No notes.") if fails else ("done", {"item_count": 3}, None)
    wait_until(lambda: len(told) == 3, because="it comes through", within=30)

    assert set(map(repr, told)) == {repr((uid, *outcome, f"https://example.org/jobs/{uid}/"))}
    assert ended(uid).status == outcome[0]
    wait_until(
        lambda: not Job.objects.filter(topic="export.finished").exists(),
        because="it is told",
        within=30,
    )


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_worker_of_another_database_runs_its_services_and_tells_of_their_ends(
    worker, files, fails, is_async
):
    seen: list[Any] = []

    def process(self: JobService, job: ServiceJob) -> None:
        with job.file("notes.csv", text=True) as f:
            f.write("a")
        seen.append(("process", job.pk, job.payload))
        if fails:
            raise GiveUp("No notes.")

    async def process_async(self: JobService, job: ServiceJob) -> None:
        process(self, job)

    def finished(self: JobService, job: ServiceJob) -> None:
        seen.append(("finished", job.pk, job.status))

    async def finished_async(self: JobService, job: ServiceJob) -> None:
        finished(self, job)

    service(
        process_async if is_async else process, finished=finished_async if is_async else finished
    )
    others = Job.objects.using("other")
    job_id = others.create(topic="export", payload='{"notes":1}').pk
    worker(topics=["export"], using="other")
    wait_until(lambda: len(seen) == 2, because="it is told", within=30)

    assert seen == [
        ("process", job_id, {"notes": 1}),
        ("finished", job_id, "failed" if fails else "done"),
    ]
    assert others.get(pk=job_id).message == ("No notes." if fails else None)
    assert len(files()) == (0 if fails else 1)


ADDRESS = """
import django
django.setup()
from django.contrib.sites import models as sites
from myxo_jobs.services.rows import ServiceJob
sites.SITE_CACHE[1] = sites.Site(pk=1, domain="example.org")
print(ServiceJob(uid="019a0000-0000-7000-8000-000000000001").url)
"""


def test_the_address_of_a_job_begins_with_the_site_where_that_is_known(settings):
    settings.ROOT_URLCONF = "tests.services.addresses"
    service(lambda self, job: None)
    uid = enqueue("export", {})
    assert get_job(uid).url == f"/jobs/{uid}/"
    settings.MYXO_JOBS = {"base_url": "https://notes.example/"}
    assert get_job(uid).url == f"https://notes.example/jobs/{uid}/"


def test_the_address_of_a_job_begins_with_the_site_of_the_sites_framework(settings):
    # In a process of its own: the framework registers itself with the admin and with signals.
    with_sites = {
        "INSTALLED_APPS": [*settings.INSTALLED_APPS, "django.contrib.sites"],
        "ROOT_URLCONF": "tests.services.addresses",
        "SITE_ID": 1,
    }
    run = subprocess.run(
        [sys.executable, "-c", ADDRESS],
        env=process_environment(settings=with_sites),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )

    address = "https://example.org/jobs/019a0000-0000-7000-8000-000000000001/\n"
    assert (run.stdout, run.stderr) == (address, "")


def test_a_job_that_is_cancelled_while_it_waits_is_told_of_too():
    told: list[str] = []
    service(
        lambda self, job: None,
        finished=lambda self, job: told.append(f"{job.reason}: {job.message}"),
    )
    uid = enqueue("export", {})
    assert cancel_job(uid) == "failed"
    run_jobs()

    assert told == ["cancelled: It was cancelled."]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_finished_says_nothing_of_a_job_that_was_retried_since(is_async):
    told: list[str] = []

    def process(self: JobService, job: ServiceJob) -> None:
        raise GiveUp

    def finished(self: JobService, job: ServiceJob) -> None:
        told.append(job.status)

    async def finished_async(self: JobService, job: ServiceJob) -> None:
        told.append(job.status)

    service(process, finished=finished_async if is_async else finished)
    uid = enqueue("export", {})
    cancel_job(uid)
    assert jobs.retry(get_job(uid).pk)
    Job.objects.filter(topic="export").update(due=ago(-60))
    assert run_jobs() == 1
    assert told == []
    assert not Job.objects.filter(topic="export.finished").exists()

    run_jobs(delayed=True)
    assert told == ["failed"]


def test_finished_says_nothing_of_a_job_that_is_gone():
    told: list[object] = []
    service(lambda self, job: None, finished=lambda self, job: told.append(job))
    uid = enqueue("export", {})
    cancel_job(uid)
    Job.objects.filter(topic="export").delete()

    assert run_jobs() == 1
    assert told == []


def test_a_service_that_has_nothing_to_tell_puts_nothing(worker, ended):
    service(lambda self, job: None)
    worker(topics=["export"])
    ended(enqueue("export", {}))

    assert Job.objects.count() == 1


# -- cancelling ----------------------------------------------------------------------


def test_a_running_job_is_cancelled_at_its_next_progress(worker, ended, files):
    def process(self: JobService, job: ServiceJob) -> None:
        with job.file("done.txt") as f:
            f.write(b"x")
        for _ in job.track(range(100_000)):
            time.sleep(0.01)

    service(process)
    worker(topics=["export"])
    uid = enqueue("export", {})
    wait_until(lambda: get_job(uid).progress_done, because="it runs", within=30)
    assert files() != []
    assert cancel_job(uid) == "running"
    job = ended(uid)

    assert (job.status, job.reason, job.attempts) == ("failed", "cancelled", 1)
    assert job.message == "It was cancelled."
    assert job.cancelled
    assert files() == []
    assert cancel_job(uid) == "failed"


def test_a_process_that_returns_all_the_same_is_done(worker, ended):
    def process(self: JobService, job: ServiceJob) -> dict[str, int]:
        wait_until(lambda: job.cancelled, because="it was cancelled", within=30)
        assert job.should_stop
        return {"item_count": 1}

    service(process)
    worker(topics=["export"])
    uid = enqueue("export", {})
    wait_until(lambda: get_job(uid).status == "running", because="it runs", within=30)
    cancel_job(uid)

    assert (ended(uid).status, ended(uid).result) == ("done", {"item_count": 1})


def test_a_service_that_cannot_be_cancelled_goes_on():
    service(lambda self, job: None, cancellable=False)
    uid = enqueue("export", {})

    assert cancel_job(uid) == "pending"
    assert not jobs.cancel(get_job(uid).pk)
    assert get_job(uid).status == "pending"


def test_nobodys_job_has_no_status():
    assert cancel_job("019a0000-0000-7000-8000-000000000001") is None
    assert cancel_job("x") is None


def test_a_drain_is_no_cancel(worker):
    started = threading.Event()
    seen: list[tuple[bool, bool]] = []

    def process(self: JobService, job: ServiceJob) -> None:
        started.set()
        wait_until(lambda: job.should_stop, because="the worker drains", within=30)
        job.progress(1)
        seen.append((job.should_stop, job.cancelled))
        raise Snooze(0)

    service(process)
    one = worker(topics=["export"])
    uid = enqueue("export", {})
    assert started.wait(30)
    one.stop()

    assert seen == [(True, False)]
    assert (get_job(uid).status, get_job(uid).attempts) == ("pending", 0)


def test_no_more_run_at_once_than_max_concurrent_in_all_workers_together(worker):
    lock, running, peaks = threading.Lock(), [0], [0]

    def process(self: JobService, job: ServiceJob) -> None:
        with lock:
            running[0] += 1
            peaks.append(running[0])
        time.sleep(0.2)
        with lock:
            running[0] -= 1

    service(process, max_concurrent=2)
    uids = [enqueue("export", {}) for _ in range(12)]
    for _ in range(3):
        worker(topics=["export"], poll=0.1)
    wait_until(
        lambda: all(get_job(uid).status == "done" for uid in uids), because="all run", within=60
    )

    assert max(peaks) == 2


# -- dials ---------------------------------------------------------------------------


def test_the_admin_comes_before_the_setting_and_the_setting_before_the_class(settings):
    service(lambda self, job: None, retention_seconds=100, max_concurrent=4)
    service(lambda self, job: None, kind="import", job_timeout_seconds=None)

    def stands() -> Mapping[str, Dials]:
        return dials(connection, ["export", "import"])

    assert stands() == {"export": Dials(100, 4, 3600), "import": Dials(604_800, 1, None)}
    settings.MYXO_JOBS = {
        "export_retention_seconds": 200,
        "export_job_timeout_seconds": 0.5,
        "import_max_concurrent": 3,
    }
    assert stands() == {"export": Dials(200, 4, 0.5), "import": Dials(604_800, 3, None)}
    ServiceSettings.objects.create(kind="export", retention_seconds=0, max_concurrent=0)
    assert stands() == {"export": Dials(0, 0, 0.5), "import": Dials(604_800, 3, None)}
    ServiceSettings.objects.update(retention_seconds=None)
    assert stands()["export"] == Dials(200, 0, 0.5)


def test_run_jobs_leaves_a_paused_kind_alone():
    ran: list[str] = []
    service(lambda self, job: ran.append("paused"), max_concurrent=0, priority=9)
    service(lambda self, job: ran.append("other"), kind="other")
    uids = [enqueue("export", {}), enqueue("other", {})]

    assert run_jobs() == 1
    assert [get_job(uid).status for uid in uids] == ["pending", "done"]
    ServiceSettings.objects.create(kind="export", max_concurrent=1)
    assert run_jobs() == 1
    assert ran == ["other", "paused"]


def test_a_dial_that_a_person_turns_takes_effect_without_a_restart(worker):
    service(lambda self, job: None)
    ServiceSettings.objects.create(kind="export", max_concurrent=0)
    worker(topics=["export"], poll=0.1)
    uid = enqueue("export", {})
    time.sleep(0.5)
    assert get_job(uid).status == "pending"
    ServiceSettings.objects.update(max_concurrent=1, retention_seconds=300)
    job = wait_until(
        lambda: get_job(uid) if get_job(uid).status == "done" else None,
        because="it is paused no more",
        within=30,
    )

    assert job.expires_at - job.completed_at == timedelta(seconds=300)
