"""The rig runs real workers: in this process, and in processes of their own."""

from __future__ import annotations

import signal

import msgspec
import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command

from myxo_jobs import Jobs, job
from myxo_jobs.models import Job
from tests import ledger as ledger_file
from tests.app.jobs import Break, CountWords, Work
from tests.app.models import Note
from tests.rig import wait_until

jobs = Jobs()


class Ping(msgspec.Struct):
    name: str


def test_a_handler_declared_in_a_test_is_run_by_a_worker_in_this_process(worker, ledger):
    @job(Ping, topic="rig.Ping")
    def ping(request: Ping) -> None:
        ledger_file.write("ping", name=request.name)

    worker(topics=["rig.Ping"])
    jobs.put(Ping("hello"))

    wait_until(lambda: ledger.count("ping", name="hello"), because="the job starts")
    wait_until(lambda: not Job.objects.exists(), because="the job is done")


def test_a_draining_process_does_what_is_due_and_exits_zero(runjobs, ledger):
    note = Note.objects.create(text="three small words")
    jobs.put_many([CountWords(note.pk), Work("one"), Work("two")])
    jobs.put(Work("later"), delay=60)

    process = runjobs("--drain", ready=False)
    assert process.wait(within=20) == 0

    note.refresh_from_db()
    assert note.words == 3
    assert {line.name for line in ledger.lines("end")} == {"one", "two"}
    assert {line.pid for line in ledger.lines()} == {process.pid}
    assert [row.payload for row in Job.objects.all()] == ['{"name":"later","seconds":0.0}']


def test_a_process_that_is_told_to_stop_finishes_its_job_and_exits_zero(runjobs, ledger):
    process = runjobs()
    jobs.put(Work("long", seconds=1.0))
    wait_until(lambda: ledger.count("begin", name="long"), because="the job starts")
    process.send(signal.SIGTERM)

    assert process.wait(within=10) == 0
    assert ledger.count("end", name="long") == 1
    assert not Job.objects.exists()


def test_a_job_that_always_raises_stays_with_its_error(runjobs, ledger):
    job_id = jobs.put(Break("leg"))
    runjobs("--topics", "notes.Break")
    row = wait_until(lambda: Job.objects.filter(failed=True).first(), because="it fails")

    assert (row.pk, row.attempts, row.error) == (job_id, 3, "ValueError: leg is broken")
    assert [line.attempt for line in ledger.lines("begin", name="leg")] == [1, 2, 3]


def test_a_condition_that_never_comes_fails_aloud():
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: pigs fly"):
        wait_until(lambda: False, because="pigs fly", within=0.05)


@pytest.mark.django_db(transaction=True)
def test_nothing_that_a_test_commits_is_left_after_it_and_all_that_migrate_wrote(make_job):
    def permissions() -> set[tuple[int, str]]:
        return set(Permission.objects.values_list("pk", "codename"))

    there = permissions()
    user = User.objects.create_user("ada")
    user.user_permissions.add(Permission.objects.first())
    make_job()
    # As Django's tests ask for it at their end.
    call_command("flush", verbosity=0, interactive=False, reset_sequences=False)

    assert not Job.objects.exists()
    assert not User.objects.exists()
    assert not User.user_permissions.through.objects.exists()
    assert permissions() == there != set()
