"""A claim is kept while its worker lives, and given up when it cannot be."""

from __future__ import annotations

import signal
import time

import msgspec
import pytest

from myxo_jobs import Jobs, Run, job
from myxo_jobs.models import Job
from tests.rig import claim_one, make_job, wait_until
from tests.worker.jobs import Blocking, Deadly, Fatal, Late, OftenFatal, Slow

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str = ""


def is_gone(job_id: int | None) -> bool:
    return not Job.objects.filter(pk=job_id).exists()


# -- while the worker lives ---------------------------------------------------


def test_a_healthy_job_that_outlasts_its_lease_starts_once_beside_an_idle_worker(runjobs, ledger):
    runjobs("--topics", "worker.Slow")
    runjobs("--topics", "worker.Slow")
    jobs.put(Slow("long", seconds=6.0))  # three leases
    wait_until(lambda: ledger.count("end") == 1, because="it ends", within=20)
    wait_until(lambda: not Job.objects.exists(), because="it is done")
    assert [line.attempt for line in ledger.lines("begin")] == [1]


def test_an_async_handler_that_blocks_the_event_loop_longer_than_its_lease_starts_once(
    runjobs, ledger
):
    first = runjobs("--topics", "worker.Blocking")
    jobs.put(Blocking("long", seconds=5.0))
    wait_until(lambda: ledger.count("begin") == 1, because="the first worker has it")
    second = runjobs("--topics", "worker.Blocking")
    # The second worker has to leave the first one's job alone, and takes the others.
    jobs.put(Blocking("short"))
    wait_until(lambda: not Job.objects.exists(), because="both are done", within=20)
    assert [(line.pid, line.attempt) for line in ledger.lines("begin", name="long")] == [
        (first.pid, 1)
    ]
    assert ledger.count("begin", name="short") == 1
    assert second.exit_code is None


def test_a_second_worker_finishes_what_a_busy_one_cannot_start(runjobs, ledger):
    busy = runjobs("--topics", "worker.Slow")
    jobs.put(Slow("long", seconds=20.0))
    wait_until(lambda: ledger.count("begin", name="long") == 1, because="the one slot is busy")
    for number in range(10):
        jobs.put(Slow(f"short {number}"))

    helper = runjobs("--topics", "worker.Slow")
    wait_until(lambda: Job.objects.count() == 1, because="the short ones are done", within=5)
    shorts = [line for line in ledger.lines("begin") if line.name != "long"]
    assert {line.pid for line in shorts} == {helper.pid}
    assert len(shorts) == 10
    assert ledger.count("end", name="long") == 0
    assert busy.exit_code is None


# -- when it does not ---------------------------------------------------------


def test_jobs_of_a_killed_worker_start_again_after_their_lease_and_hold_up_no_others(
    runjobs, ledger
):
    for name in "ab":
        jobs.put(Slow(name, seconds=30.0))
    first = runjobs("--topics", "worker.Slow", "--workers", "2")
    wait_until(lambda: ledger.count("begin") == 2, because="both slots are busy")
    first.kill()
    killed = time.monotonic()
    claimed_until = {row.pk: row.lease_until for row in Job.objects.all()}
    jobs.put(Slow("other"))

    runjobs("--topics", "worker.Slow", "--workers", "3")
    wait_until(lambda: ledger.count("end", name="other") == 1, because="others run", within=5)
    wait_until(lambda: ledger.count("begin") == 5, because="they start again", within=15)
    again = [line for line in ledger.lines("begin") if line.attempt == 2]
    assert sorted(line.name for line in again) == ["a", "b"]
    # The lease of two seconds, less what had passed since it was renewed.
    assert all(line.at - killed < 2.0 + 4.0 for line in again)
    for row in Job.objects.all():
        assert (row.status, row.attempts) == ("running", 2)
        assert row.started_at >= claimed_until[row.pk]


def test_jobs_of_a_killed_worker_start_again_before_the_backlog_behind_them(runjobs, ledger):
    jobs.put_many(Slow(str(number), seconds=0.005) for number in range(6000))
    first = runjobs("--topics", "worker.Slow")
    wait_until(lambda: ledger.count("begin") > 100, because="the topic is known to be quick")
    first.kill()
    killed = time.monotonic()
    held = set(Job.objects.filter(status="running").values_list("pk", flat=True))
    assert 5 < len(held) < 200  # claimed ahead, so that each is a suspect now

    runjobs("--topics", "worker.Slow")
    wait_until(lambda: not Job.objects.filter(pk__in=held).exists(), because="they are done")
    assert time.monotonic() - killed < 2.0 + 3.0
    assert Job.objects.count() > 500  # what was put after them waits still


@pytest.mark.parametrize(
    ("request_type", "options"),
    [(Fatal, []), (Fatal, ["--processes", "2"]), (OftenFatal, ["--processes", "2"])],
    ids=["alone", "processes", "processes, many attempts"],
)
def test_a_job_gets_done_though_another_one_kills_its_process_again_and_again(
    runjobs, ledger, request_type, options
):
    jobs.put_many([request_type("killer", kills=True), request_type("bystander")])
    attempts = {Fatal: 3, OftenFatal: 10}[request_type]
    starts = 0
    while Job.objects.filter(failed=False).exists():
        starts += 1
        assert starts <= attempts + 1, "the queue is never empty"
        process = runjobs("--topics", f"worker.{request_type.__name__}", *options)
        wait_until(
            lambda: process.exit_code is not None or not Job.objects.filter(failed=False).exists(),  # noqa: B023
            because="the process dies, or all is done",
            within=40,
        )
        process.end()

    assert ledger.count("end", name="bystander") == 1
    # It need not wait for the later half of its attempts, in which suspects run alone.
    assert ledger.lines("end", name="bystander")[0].attempt <= 5
    assert [line.attempt for line in ledger.lines("begin", name="killer")] == [
        *range(1, attempts + 1)
    ]
    row = Job.objects.get()
    assert (row.status, row.attempts) == ("failed", attempts)
    assert '"killer"' in row.payload


def test_a_worker_with_the_host_and_process_number_of_a_dead_one_leaves_its_claim_alone(worker):
    # What a worker with this host's name and this process's number left behind.
    row = make_job("t.Task")
    left = claim_one("t.Task", lease=2.5)
    claimed_until = Job.objects.get(pk=row.pk).lease_until
    runs: list[tuple[int, Job]] = []

    @job(Task, topic="t.Task", lease=2.5)
    def handle(request: Task, run: Run) -> None:
        runs.append((run.attempt, Job.objects.get(pk=run.id)))

    Job.objects.filter(pk=row.pk).update(payload="{}")
    worker(topics=["t.Task"])
    wait_until(lambda: is_gone(row.pk), because="it runs again after the lease", within=10)
    (attempt, seen), *others = runs
    assert (attempt, others) == (2, [])
    assert seen.worker != left.token
    assert seen.started_at >= claimed_until  # not renewed, and not taken early


def test_a_job_that_kills_its_process_is_started_as_often_as_it_has_attempts(runjobs, ledger):
    jobs.put_many([Deadly("good 1"), Deadly("deadly", kills=True), Deadly("good 2")])
    processes = 0
    while Job.objects.filter(failed=False).exists():
        processes += 1
        assert processes <= 5, "the queue is never empty"
        process = runjobs("--topics", "worker.Deadly")
        wait_until(
            lambda: process.exit_code is not None or not Job.objects.filter(failed=False).exists(),  # noqa: B023
            because="the process dies, or all is done",
            within=15,
        )
        process.end()

    assert processes == 3
    assert [line.attempt for line in ledger.lines("begin", name="deadly")] == [1, 2]
    # Its neighbour in the claim was charged for it once at most, and ran nevertheless.
    assert ledger.count("begin", name="good 2") == 1
    assert ledger.count("begin", name="good 1") >= 1
    row = Job.objects.get()
    assert (row.status, row.attempts) == ("failed", 2)
    assert row.error.startswith("WorkerLost: the worker was lost")


def test_a_worker_that_was_paused_past_its_lease_changes_nothing(runjobs, ledger):
    job_id = jobs.put(Late("paused"))
    paused = runjobs("--topics", "worker.Late")
    wait_until(lambda: ledger.count("begin") == 1, because="the first worker runs it")
    paused.send(signal.SIGSTOP)
    other = runjobs("--topics", "worker.Late")
    wait_until(lambda: Job.objects.filter(failed=True), because="the other gave up", within=10)
    before = Job.objects.filter(pk=job_id).values().get()

    paused.send(signal.SIGCONT)
    paused.wait_for_log("lost its claim")
    assert ledger.count("end") == 1  # the handler of the late worker did return
    assert Job.objects.filter(pk=job_id).values().get() == before
    assert before["error"] == "GiveUp: the second attempt says so"
    assert (paused.exit_code, other.exit_code) == (None, None)

    next_id = jobs.put(Late("next"))
    wait_until(lambda: is_gone(next_id), because="the workers are fine", within=10)
