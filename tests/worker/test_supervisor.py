"""runjobs --processes: worker processes die, and their jobs go on."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from django.db import connection, transaction

from myxo_jobs import Jobs, Run, job, queue
from myxo_jobs.handlers import registry
from myxo_jobs.models import Job
from myxo_jobs.queue import Claim
from myxo_jobs.worker.board import PLACES, Board
from tests.rig import (
    ROOT,
    Process,
    ago,
    claim_one,
    handler_of,
    make_job,
    process_environment,
    wait_until,
    wind_back,
)
from tests.worker.jobs import Blocking, Die, Frozen, FrozenAsync, Overtaken, Slow, Steady, Tiny

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Task(msgspec.Struct, frozen=True):
    name: str = ""


def lives(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_done(within: float = 20.0) -> None:
    wait_until(lambda: not Job.objects.exists(), because="all is done", within=within)


def both_idle(process: Process, count: int = 2) -> list[int]:
    wait_until(
        lambda: process.log().count(" started using=") >= count, because="the workers have started"
    )
    return process.children()


# -- a death ------------------------------------------------------------------


def test_a_job_of_a_killed_process_starts_again_within_a_second_and_tells_why(runjobs, ledger):
    process = runjobs("--topics", "worker.Steady", "--processes", "2")
    both_idle(process)
    gaps = []
    for name in "abc":
        job_id = jobs.put(Steady(name, seconds=60.0))  # under a lease of 30 s
        (first,) = wait_until(lambda: ledger.lines("begin", name=name), because="it runs")  # noqa: B023
        os.kill(first.pid, signal.SIGKILL)
        killed = time.monotonic()
        _, second = wait_until(
            lambda: len(lines := ledger.lines("begin", name=name)) == 2 and lines,  # noqa: B023
            because="it runs again",
        )
        gaps.append(second.at - killed)
        assert (first.attempt, second.attempt) == (1, 2)
        row = Job.objects.get(pk=job_id)
        assert row.error == "WorkerLost: its worker process was killed by signal SIGKILL"
        assert row.status == "running"
        jobs.discard(row.pk)
        os.kill(second.pid, signal.SIGKILL)  # frees the slot
    assert max(gaps) < 1.0, gaps
    assert process.exit_code is None


def test_what_a_killed_process_had_not_started_has_used_no_attempt(runjobs, ledger):
    process = runjobs("--topics", "worker.Blocking", "--processes", "1", "--poll", "0.1")
    blocks = jobs.put(Blocking("blocks", seconds=3.0))
    (first,) = wait_until(lambda: ledger.lines("begin"), because="it blocks the loop")
    others = [jobs.put(Blocking(f"waits {place}")) for place in range(3)]
    wait_until(
        lambda: Job.objects.filter(pk__in=others, status="running").count() == 3,
        because="they are claimed",
        within=2.5,
    )
    os.kill(first.pid, signal.SIGKILL)
    all_done()
    attempts = {line.job: line.attempt for line in ledger.lines("begin") if line.pid != first.pid}
    assert attempts == {blocks: 2, **dict.fromkeys(others, 1)}
    assert process.exit_code is None


def test_jobs_that_end_their_process_are_started_as_often_as_they_may_be_and_the_others_get_done(
    runjobs, ledger
):
    for how in ("lives", "killed", "aborted", "lives", "left", "lives"):
        jobs.put(Die(how))
    process = runjobs("--topics", "worker.Die", "--processes", "2")
    wait_until(
        lambda: not Job.objects.filter(failed=False).exists(), because="it comes to rest", within=20
    )
    errors = {row.payload: (row.attempts, row.error) for row in Job.objects.all()}
    lost = "WorkerLost: its worker process"
    assert errors == {
        '{"how":"killed"}': (2, f"{lost} was killed by signal SIGKILL"),
        '{"how":"aborted"}': (2, f"{lost} was killed by signal SIGABRT"),
        '{"how":"left"}': (2, f"{lost} exited with status 0"),
    }
    for how in ("killed", "aborted", "left"):
        assert [line.attempt for line in ledger.lines("begin", name=how)] == [1, 2]
    assert len({line.job for line in ledger.lines("begin", name="lives")}) == 3
    assert process.exit_code is None


def test_a_drain_ends_when_all_is_done_although_a_job_ends_its_process(runjobs, ledger):
    for how in ("left", "killed", "lives", "lives"):
        jobs.put(Die(how))
    process = runjobs("--topics", "worker.Die", "--processes", "2", "--drain")
    assert process.wait(within=20) == 0
    assert sorted(row.payload for row in Job.objects.all()) == [
        '{"how":"killed"}',
        '{"how":"left"}',
    ]
    assert Job.objects.filter(failed=True).count() == 2


def test_a_job_whose_row_is_locked_when_its_process_dies_starts_again_once_it_is_free(
    runjobs, ledger
):
    process = runjobs("--topics", "worker.Steady", "--processes", "2")
    both_idle(process)
    job_id = jobs.put(Steady("a", seconds=60.0))
    (first,) = wait_until(lambda: ledger.lines("begin"), because="it runs")
    with transaction.atomic():
        Job.objects.filter(pk=job_id).update(priority=1)
        os.kill(first.pid, signal.SIGKILL)
        time.sleep(1.2)
        assert ledger.count("begin") == 1
    wait_until(lambda: ledger.count("begin") == 2, because="it runs again", within=5)
    assert ledger.lines("begin")[1].attempt == 2


def test_a_process_that_dies_before_its_first_job_is_replaced_after_growing_pauses(runjobs):
    process = runjobs("--topics", "worker.Slow", "--processes", "1")
    born, died = [], []
    seen: set[int] = set()
    while len(born) < 5:
        new = wait_until(
            lambda: set(process.children()) - seen,  # noqa: B023
            because="another one is started",
        )
        born.append(time.monotonic())
        seen |= new
        for pid in new:
            os.kill(pid, signal.SIGKILL)
        died.append(time.monotonic())
    pauses = [birth - death for birth, death in zip(born[1:], died, strict=False)]
    assert max(pauses[:2]) < 0.7, pauses
    assert pauses[2] >= 0.9, pauses
    assert pauses[3] >= 1.9, pauses


def test_a_worker_that_is_told_to_stop_alone_finishes_its_job_and_is_replaced(runjobs, ledger):
    process = runjobs("--topics", "worker.Steady", "--processes", "1")
    jobs.put(Steady("runs", seconds=1.0))
    (begin,) = wait_until(lambda: ledger.lines("begin"), because="it runs")
    os.kill(begin.pid, signal.SIGTERM)
    jobs.put(Steady("next"))
    all_done()
    assert [(line.name, line.attempt) for line in ledger.lines("end")] == [("runs", 1), ("next", 1)]
    assert ledger.lines("begin")[1].pid != begin.pid
    assert "pid=" not in process.log()  # nothing died


# -- while they live ----------------------------------------------------------


def test_a_job_keeps_its_claim_while_its_process_keeps_the_interpreter(runjobs, ledger):
    runjobs("--topics", "worker.Frozen", "--processes", "1")
    jobs.put(Frozen("long", seconds=3.0))  # three leases
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    runjobs("--topics", "worker.Frozen")
    all_done()
    assert [line.attempt for line in ledger.lines("begin")] == [1]


def test_what_a_process_cannot_start_is_others_when_its_lease_is_over(runjobs, ledger):
    jobs.put(FrozenAsync("keeps", seconds=10.0))
    jobs.put(FrozenAsync("waits"))
    runjobs("--topics", "worker.FrozenAsync", "--processes", "1")
    wait_until(lambda: ledger.count("begin", name="keeps"), because="it runs")
    runjobs("--topics", "worker.FrozenAsync")
    wait_until(lambda: ledger.count("end", name="waits"), because="the other can start it")
    assert ledger.count("end", name="keeps") == 0
    all_done(within=40)
    # The other worker may meet it a moment before the supervisor gives it back: then it is
    # a bystander that is charged once, and never more.
    assert [line.attempt for line in ledger.lines("begin")] in ([1, 1], [1, 2])


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("meanwhile", ["given up", "failed unrun", "done and put anew"])
def test_a_process_that_is_paused_past_its_lease_lets_its_job_go_and_changes_nothing(
    runjobs, ledger, meanwhile, raises
):
    is_last = meanwhile == "failed unrun"
    request = Overtaken(
        "a",
        slow_attempt=2 if is_last else 1,
        raises=raises,
        others_return=meanwhile == "done and put anew",
    )
    job_id = jobs.put(request, key="k")
    Job.objects.filter(pk=job_id).update(attempts=1 if is_last else 0)
    supervisor = runjobs("--topics", "worker.Overtaken", "--processes", "1")
    (begin,) = wait_until(lambda: ledger.lines("begin"), because="it runs")
    os.kill(begin.pid, signal.SIGSTOP)
    try:
        runjobs("--topics", "worker.Overtaken")
        ready = time.monotonic()
        wait_until(
            lambda: not Job.objects.filter(pk=job_id, failed=False).exists(),
            because="the other worker has it",
        )
        assert time.monotonic() - ready < 1.0 + 5.0
        if meanwhile == "done and put anew":
            jobs.put(Overtaken("anew"), key="k", delay=60)
        before = Job.objects.values().get()
    finally:
        os.kill(begin.pid, signal.SIGCONT)

    supervisor.wait_for_log("lost its claim")
    assert ledger.count("end", name="a") == 1  # the late run did come to its end
    time.sleep(0.5)
    assert Job.objects.values().get() == before
    errors = {"given up": "GiveUp", "failed unrun": "WorkerLost", "done and put anew": ""}
    assert before["error"].partition(":")[0] == errors[meanwhile]
    assert supervisor.children() == [begin.pid]
    jobs.put(Overtaken("next", others_return=True, slow_attempt=0))
    wait_until(lambda: Job.objects.count() == 1, because="the workers are fine")


def sockets(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:") and int(descriptor.name) > 2:
                found.add(target)
    return found


def test_no_two_processes_share_a_connection(runjobs, ledger):
    process = runjobs("--topics", "worker.Steady", "--processes", "3")
    jobs.put(Steady("a", seconds=60.0))
    (begin,) = wait_until(lambda: ledger.lines("begin"), because="it runs")
    os.kill(begin.pid, signal.SIGKILL)  # so that the supervisor has had a connection
    wait_until(lambda: ledger.count("begin") == 2, because="it runs again")
    pids = both_idle(process, 4)
    assert len(pids) == 3
    wait_until(
        lambda: all(sockets(pid) for pid in pids),
        because="each process has the socket of its event loop at least",
    )
    held = {pid: sockets(pid) for pid in (process.pid, *pids)}
    for one, other in itertools.combinations(held, 2):
        assert held[one] & held[other] == set()


# -- the end ------------------------------------------------------------------


@pytest.mark.parametrize("to", ["the supervisor", "the whole group"])
def test_processes_that_are_told_to_stop_finish_what_runs_and_start_nothing_else(
    runjobs, ledger, to
):
    process = runjobs("--topics", "worker.Steady", "--processes", "2")
    for name in "ab":
        jobs.put(Steady(name, seconds=1.5))
    wait_until(lambda: ledger.count("begin") == 2, because="both run")
    waiting = [jobs.put(Steady("waits")) for _ in range(3)]
    pids = process.children()
    process.send(signal.SIGTERM)
    if to == "the whole group":
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
    assert process.wait(within=10) == 0
    assert sorted(line.name for line in ledger.lines("end")) == ["a", "b"]
    rows = Job.objects.all()
    assert {row.pk for row in rows} == set(waiting)
    assert {(row.status, row.attempts, row.worker) for row in rows} == {("pending", 0, "")}
    assert not any(lives(pid) for pid in pids)


ENDS = """
import os, signal, threading
import django
django.setup()
from myxo_jobs.worker.supervisor import Supervisor
from myxo_jobs.worker.worker import Worker
supervisor = Supervisor(
    1,
    lambda board: Worker(["worker.Steady"], board=board),
    alias="default",
    grace=30.0,
    drain=False,
)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
print(supervisor.run(), signal.getitimer(signal.ITIMER_REAL))
"""


def test_a_supervisor_that_has_ended_leaves_no_alarm_behind():
    environment = process_environment()
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.stdout == "0 (0.0, 0.0)\n", ended.stderr


def test_what_outlasts_the_grace_is_given_back_even_if_it_keeps_the_interpreter(runjobs, ledger):
    process = runjobs("--topics", "worker.Frozen,worker.Steady", "--processes", "2", "--grace", "1")
    ids = [jobs.put(Frozen("keeps", seconds=60.0))]
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    ids.append(jobs.put(Steady("sleeps", seconds=60.0)))
    wait_until(lambda: ledger.count("begin") == 2, because="both run")
    pids = process.children()
    process.send(signal.SIGTERM)
    assert process.wait(within=1 + 2 + 3) == 0
    rows = Job.objects.filter(pk__in=ids)
    assert {(row.status, row.attempts, row.worker) for row in rows} == {("pending", 0, "")}
    assert not any(lives(pid) for pid in pids)


def test_a_second_signal_ends_all_processes_at_once(runjobs, ledger):
    process = runjobs("--topics", "worker.Frozen,worker.Steady", "--processes", "2")
    jobs.put(Frozen("keeps", seconds=60.0))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    jobs.put(Steady("sleeps", seconds=60.0))
    wait_until(lambda: ledger.count("begin") == 2, because="both run")
    pids = process.children()
    process.send(signal.SIGINT)
    time.sleep(0.5)
    assert process.exit_code is None
    process.send(signal.SIGINT)
    assert process.wait(within=3) == 130
    wait_until(lambda: not any(lives(pid) for pid in pids), because="they are gone", within=2)
    rows = Job.objects.all()
    assert {(row.failed, row.attempts) for row in rows} == {(False, 1)}


def test_when_the_supervisor_is_killed_its_workers_take_nothing_more_and_drain(runjobs, ledger):
    process = runjobs("--topics", "worker.Steady", "--processes", "2")
    pids = both_idle(process)
    jobs.put(Steady("runs", seconds=2.0))
    wait_until(lambda: ledger.count("begin") == 1, because="it runs")
    process.kill()
    time.sleep(1.0)
    later = jobs.put(Steady("later"))
    wait_until(lambda: not any(lives(pid) for pid in pids), because="they end", within=10)
    assert [(line.name, line.attempt) for line in ledger.lines("end")] == [("runs", 1)]
    row = Job.objects.get()
    assert (row.pk, row.status, row.attempts) == (later, "pending", 0)


# -- suspects -----------------------------------------------------------------


def test_suspects_in_their_later_attempts_run_one_by_one(worker):
    """Among several whose workers died, the killer is found, and takes no other along."""
    running: list[str] = []
    beside: list[tuple[str, ...]] = []
    lock = threading.Lock()

    @job(Task, topic="t.Task", workers=6)
    def handle(request: Task, run: Run) -> None:
        with lock:
            running.append(request.name)
            beside.append(tuple(running))
        time.sleep(0.2)
        with lock:
            running.remove(request.name)

    for place in range(4):
        make_job("t.Task", status="expired", attempts=5, payload=f'{{"name":"late {place}"}}')
    make_job("t.Task", status="expired", attempts=1, payload='{"name":"early"}')
    for place in range(6):
        make_job("t.Task", payload=f'{{"name":"fresh {place}"}}')
    worker(topics=["t.Task"])
    all_done()
    together = [[name for name in names if not name.startswith("fresh")] for names in beside]
    assert max(len(names) for names in together) == 1, beside
    assert {name for names in beside for name in names} >= {"early", "late 3", "fresh 5"}


def test_a_suspect_that_had_to_wait_stays_one_and_is_not_run_once_too_often(worker, caplog):
    let_go = threading.Event()
    started: list[tuple[str, int]] = []

    @job(Task, topic="t.Task", workers=3)
    def handle(request: Task, run: Run) -> None:
        started.append((request.name, run.attempt))
        if request.name == "early":
            let_go.wait(20)

    make_job("t.Task", status="expired", attempts=1, due=ago(90), payload='{"name":"early"}')
    make_job("t.Task", status="expired", attempts=7, payload='{"name":"late"}')
    used_up = make_job("t.Task", status="expired", attempts=10, payload='{"name":"used up"}')
    worker(topics=["t.Task"], poll=0.1)
    wait_until(lambda: started, because="the first suspect runs")
    time.sleep(1.0)
    assert started == [("early", 2)]
    assert len([line for line in caplog.messages if "given back" in line]) <= 1
    let_go.set()
    wait_until(lambda: Job.objects.filter(failed=True), because="they had their turn")
    wait_until(lambda: Job.objects.count() == 1, because="the late one is done")
    assert started == [("early", 2), ("late", 8)]
    row = Job.objects.get(pk=used_up.pk)
    assert (row.failed, row.attempts) == (True, 10)
    assert row.error.startswith("WorkerLost")


def test_a_suspect_that_is_left_unstarted_keeps_its_attempt_and_is_claimable_at_once():
    make_job("notes.Work")
    wind_back(claim_one(), seconds=31)
    before = Job.objects.get()
    suspect = claim_one()
    assert (suspect.suspect, suspect.attempt) == (True, 2)

    assert queue.leave(connection, [suspect]) == {suspect.job_id}
    assert queue.leave(connection, [suspect]) == set()  # it is nobody's now
    row = Job.objects.get()
    assert (row.attempts, row.due) == (1, before.due)
    again = claim_one()
    assert (again.suspect, again.attempt) == (True, 2)


# -- what a worker tells ------------------------------------------------------


def claim_of(job_id: int, **values: object) -> Claim:
    handler = handler_of("t.Task", attempts=3, lease=8.0)
    claim = Claim(job_id, f"0123456789abcdef.{job_id}", handler, "{}", None, 1, None, False, 50.0)
    for name, value in values.items():
        setattr(claim, name, value)
    return claim


def test_the_board_tells_which_jobs_are_held_and_how_far_they_are():
    board = Board()
    board.introduce("0123456789abcdef")
    one, two, three = claim_of(1), claim_of(2, attempt=3), claim_of(3, suspect=True)
    board.add([one, two, three])
    assert not board.has_started_a_job
    board.start(two, overdue_at=70.0)

    told = {entry.job_id: entry for entry in board.entries()}
    assert {entry.held for entry in told.values()} == {one.held, two.held, three.held}
    assert [told[i].started for i in (1, 2, 3)] == [False, True, False]
    assert [told[i].suspect for i in (1, 2, 3)] == [False, False, True]
    assert [told[i].is_last_attempt for i in (1, 2, 3)] == [False, True, False]
    assert (told[2].overdue_at, told[2].lease, told[2].lease_ends) == (70.0, 8.0, 50.0)
    assert board.has_started_a_job

    board.interrupt(two)
    assert [entry.interrupted for entry in board.entries()] == [False, True, False]
    board.remove(one)
    board.remove(two)
    assert [entry.job_id for entry in board.entries()] == [3]
    assert board.room == PLACES - 1


def test_a_worker_claims_no_more_than_its_board_has_places_for(worker):
    started: list[str] = []

    @job(Task, topic="t.Task", workers=4)
    def handle(request: Task) -> None:
        started.append(request.name)

    board = Board()
    board.add(claim_of(10**9 + place) for place in range(PLACES - 2))
    jobs.put_many(Task(str(place)) for place in range(20))
    worker(topics=["t.Task"], board=board)
    all_done()
    assert len(started) == 20
    assert board.room == 2


# -- what it refuses ----------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--processes", "0", "--processes takes a whole number from 1, not 0"),
        ("--max-jobs", "0", "--max-jobs takes a whole number from 1, not 0"),
        ("--max-rss", "-1", "--max-rss takes MiB above 0, not -1"),
    ],
)
def test_a_number_that_is_out_of_range_is_refused(option, value, words):
    from django.core.management import CommandError, call_command

    with pytest.raises(CommandError, match=words):
        call_command("runjobs", option, value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topics", ""], "no topic is left to serve"),
        (["--topics", " , "], "no topic is left to serve"),
        (["--topics", "worker.Slow", "--exclude", "worker.Slow"], "no topic is left to serve"),
        (["--exclude", "all of them"], "no topic is left to serve"),
        (["--topics", "worker.Slow,worker.Typo"], r"no handler for topic worker\.Typo"),
        (["--exclude", "worker.Typo"], r"no handler for topic worker\.Typo"),
    ],
    ids=str,
)
def test_a_choice_that_leaves_no_topic_or_names_an_unknown_one_is_refused(options, words):
    from django.core.management import CommandError, call_command

    topics = ",".join(handler.topic for handler in registry)
    with pytest.raises(CommandError, match=words):
        call_command("runjobs", "--drain", *[topics if o == "all of them" else o for o in options])


def test_many_jobs_under_several_processes_start_once_each(runjobs, ledger):
    jobs.put_many(Tiny(str(number)) for number in range(500))
    jobs.put(Slow("one"))
    process = runjobs("--topics", "worker.Tiny,worker.Slow", "--processes", "3", "--drain")
    assert process.wait(within=30) == 0
    assert not Job.objects.exists()
    begins = ledger.lines("begin")
    assert len({line.name for line in begins}) == len(begins) == 501
    assert "Traceback" not in process.log()
