"""What must hold after every scenario, whatever was done to the workers and the database.

I1  every acknowledged put has ended, or waits with a reason
I2  no put that was rolled back has run
I3  each job has one recorded outcome, the one that its last run had
I4  runs of one job overlap only if the earlier one's claim could be lost
I5  each further run of a job has a reason: it raised, or a fault took its claim away
I7  nothing is claimed at the end
I8  the server's log has no deadlock, and no error but those of the fault
I9  the workers live, and use what they used at the start

I6 is about results, which services alone have: their scenarios look at them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from tests.chaos.jobs import LEASE, AsyncHang, Dirt, Frozen, Hang, Poison, Stale, Work, Zoo
from tests.chaos.oracle import Put
from tests.chaos.rig import POSTGRES, Loss, Rig, connections_of_workers, level_of
from tests.ledger import Line

# An outcome is stored, or forgotten by an immediate stop of the server, within so long
# of the run's end: three times wal_writer_delay, and some for a busy machine.
SETTLED_SECONDS = 2.0
FORGOTTEN_SECONDS = 1.0
# A run that was stopped at its very beginning says so within so long of its continuation.
AFTER_A_STOP_SECONDS = 0.1
# A claim was renewed at two thirds of its lease at the latest; a tick may be late.
LEFT_OF_A_LEASE = LEASE * 0.4

# How long a process may take to die of its job; of a hang after its timeout, the grace
# and what the supervisor adds.
DYING_SECONDS: dict[type, float] = {Poison: 1.0, Hang: 8.0, Frozen: 20.0}
SPARE_DESCRIPTORS = 50  # a handler's thread opens up to three for its connection
SPARE_RSS_MIB = 64
LONGEST_LIST = 5

# What the server says when a client was killed.
ALWAYS_EXPECTED = [r"FATAL:  connection to client lost"]


class Run(msgspec.Struct):
    """One run of a handler, as the ledger has it."""

    number: int
    job: int
    attempt: int
    pid: int
    begun: float
    ended: float = float("inf")
    how: str = ""  # end or raise; empty when it never ended

    def __str__(self) -> str:
        took = f"{self.ended - self.begun:.2f} s" if self.how else "no end"
        return f"attempt {self.attempt} at {self.begun:.2f} in {self.pid}, {took} {self.how}"


class Report(msgspec.Struct, frozen=True):
    """What became of a run of a scenario."""

    fault: str
    database: str
    seed: int
    bites: int
    puts: int
    lost: int
    run_twice: int
    slowest_recovery: float | None
    violations: list[str]
    notes: list[str] = []
    kills: int = 0
    interrupted: int = 0
    failed_unrun: int = 0
    unexplained: int = 0
    median_recovery: float | None = None
    # Why this machine did not let the fault be injected.
    obstacle: str = ""

    @property
    def verdict(self) -> str:
        if self.obstacle:
            return f"not possible here: {self.obstacle}"
        if self.violations:
            return "FAILED"
        return "passed" if self.bites else "void"


def runs_of(lines: list[Line]) -> dict[int, list[Run]]:
    """Return the runs of each job, in the order of their begins."""
    runs: defaultdict[int, list[Run]] = defaultdict(list)
    unfinished: dict[tuple[int, int, int], Run] = {}
    for line in lines:
        place = (line.job, line.attempt, line.pid)
        if line.event == "begin":
            run = Run(int(line.name), line.job, line.attempt, line.pid, line.at)
            unfinished[place] = run
            runs[line.job].append(run)
        elif line.event in ("end", "raise"):
            ended = unfinished.pop(place, None)
            if ended is not None:  # else it was in a process that a handler has forked
                ended.ended, ended.how = line.at, line.event
    for of_job in runs.values():
        of_job.sort(key=lambda run: run.begun)
    return runs


def excuses(loss: Loss, run: Run, following: Run) -> bool:
    """Tell whether a loss can be why a job ran again."""
    settled = run.ended + SETTLED_SECONDS
    if loss.kind == "outage":
        return loss.since - FORGOTTEN_SECONDS <= settled and loss.until >= run.begun
    if loss.kind == "stop" and loss.pid == following.pid and following.attempt < run.attempt:
        # Its process was stopped between its last look at the lease and its first line.
        return abs(following.begun - loss.until) < AFTER_A_STOP_SECONDS
    if loss.pid != run.pid:
        return False
    if loss.kind == "stop":
        may_be_lost = loss.since + LEFT_OF_A_LEASE <= following.begun
        return may_be_lost and loss.since <= settled and loss.until >= run.begun
    was_in_time = run.begun <= loss.until and loss.since <= settled
    return was_in_time and loss.since <= following.begun


class Check:
    """Looks at everything once, after the queue has drained."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._runs = runs_of(rig.ledger.lines())
        self._puts = {put.number: put for put in rig.oracle.puts}
        self._rows = self._read_rows()
        self._losses_of: defaultdict[int | None, list[Loss]] = defaultdict(list)
        self._lost: list[Put] = []
        self._failed_unrun = 0
        self._twice: list[list[Run]] = []
        self._unexplained: list[str] = []

    def report(self) -> Report:
        self._note_losses()
        self._nothing_is_lost()
        self._nothing_rolled_back_ran()
        self._outcomes_are_those_of_the_last_runs()
        self._each_second_run_has_a_reason()
        self._recoveries_are_quick()
        self._nothing_is_claimed()
        self._the_log_is_clean()
        self._workers_are_well()
        rig = self._rig
        interrupted = self._interrupted()
        return Report(
            fault=rig.fault,
            database=rig.database,
            seed=rig.seed,
            bites=interrupted if rig.bites is None else rig.bites,
            puts=sum(put.outcome == "acknowledged" for put in rig.oracle.puts),
            lost=len(self._lost),
            run_twice=len(self._twice),
            slowest_recovery=max(rig.recoveries, default=None),
            violations=rig.violations,
            notes=rig.notes,
            kills=sum(loss.kind == "kill" for loss in rig.losses),
            interrupted=interrupted,
            failed_unrun=self._failed_unrun,
            unexplained=len(self._unexplained),
            median_recovery=median(rig.recoveries) if rig.recoveries else None,
        )

    def _read_rows(self) -> dict[int, dict[str, Any]]:
        from myxo_jobs.models import Job

        columns = ("id", "topic", "status", "attempts", "error", "payload", "due", "lease_until")
        rows = {row["id"]: row for row in Job.objects.values(*columns)}
        for row in rows.values():
            row["number"] = msgspec.json.decode(row["payload"])["number"]
        return rows

    def _violate(self, what: str, examples: list[Any]) -> None:
        if examples:
            shown = "; ".join(str(one) for one in examples[:LONGEST_LIST])
            self._rig.violate(f"{what}: {len(examples)}, such as {shown}")

    # -- I1, I2, I3 ----------------------------------------------------------

    def _nothing_is_lost(self) -> None:
        rig = self._rig
        there = {*self._rows, *rig.discarded}
        for put in self._puts.values():
            if put.outcome != "acknowledged" or put.job_id in there:
                continue
            runs = self._runs.get(put.job_id or 0, [])
            if not any(run.how == "end" for run in runs):
                self._lost.append(put)
        self._violate("I1 lost", self._lost)
        waiting = [
            row
            for row in self._rows.values()
            if row["status"] == "pending" and row["topic"] not in self._rig.unhandled
        ]
        self._violate("I1 wait without a reason", waiting)

    def _nothing_rolled_back_ran(self) -> None:
        turned_back = ("rolled back", "refused")
        numbers = {put.number for put in self._puts.values() if put.outcome in turned_back}
        ran = [runs[0] for runs in self._runs.values() if runs[0].number in numbers]
        self._violate("I2 ran though rolled back", ran)
        there = [row for row in self._rows.values() if row["number"] in numbers]
        self._violate("I2 in the table though rolled back", there)

    def _outcomes_are_those_of_the_last_runs(self) -> None:
        wrong = []
        for put in self._puts.values():
            if put.outcome not in ("acknowledged", "unknown") or put.job_id is None:
                continue
            if put.job_id in self._rig.discarded:
                continue
            runs = self._runs.get(put.job_id, [])
            row = self._rows.get(put.job_id)
            if row is not None and row["status"] == "failed":
                if not runs:
                    self._failed_unrun += 1
                    wrong.append(f"{put.request} failed without a run: {row['error'][:200]}")
                elif not may_fail(put.request):
                    wrong.append(f"{put.request} failed: {row['error'][:200]}")
            elif row is None and runs and must_fail(put.request, runs):
                wrong.append(f"{put.request} is done, though {runs[-1]}")
        self._violate("I3 another outcome than the last run's", wrong)
        stored = re.findall(
            r"job=(\d+) topic=\S+ attempt=\d+ (?:done|cancelled|failed for good)",
            "\n".join(tree.log() for tree in (*self._rig.trees, *self._rig.retired)),
        )
        forgetful = any(loss.kind == "outage" for loss in self._rig.losses)
        again = {str(job_id) for job_id in self._rig.run_again}
        if not forgetful:
            self._violate("I3 two outcomes recorded", sorted(_twice(stored) - again))

    # -- I4, I5 --------------------------------------------------------------

    def _each_second_run_has_a_reason(self) -> None:
        for runs in self._runs.values():
            again = [
                (run, following)
                for run, following in pairwise(runs)
                if not (run.how == "raise" and run.ended <= following.begun)
            ]
            if again:
                self._twice.append(runs)
            self._unexplained += [
                f"job {run.job}: {run}; then {following}"
                for run, following in again
                if not any(excuses(loss, run, following) for loss in self._rig.losses)
            ]
        self._violate("I4/I5 ran again without a reason", self._unexplained)

    def _note_losses(self) -> None:
        """Sort the losses by process, with those that end for the sake of their own jobs."""
        for runs in self._runs.values():
            put = self._puts.get(runs[0].number)
            dying = None if put is None else DYING_SECONDS.get(type(put.request))
            if dying is not None:
                self._rig.losses += [
                    Loss("kill", run.pid, run.begun, run.begun + dying) for run in runs
                ]
        for loss in self._rig.losses:
            self._losses_of[loss.pid].append(loss)

    def _interrupted(self) -> int:
        """Return how many runs a fault has interrupted, or let outlive their claims."""
        return sum(
            1
            for runs in self._runs.values()
            for run in runs
            if any(run.begun <= loss.since <= run.ended for loss in self._losses_of[run.pid])
        )

    def _recoveries_are_quick(self) -> None:
        slow = []
        claimed_in_vain = []
        for runs in self._runs.values():
            for run, following in pairwise(runs):
                for loss in self._losses_of[run.pid]:
                    if loss.kind != "kill" or loss.within is None:
                        continue
                    if not run.begun <= loss.since < run.ended:
                        continue
                    took = following.begun - loss.since
                    waited = following.begun - self._turn_of(following, loss.since)
                    # Further attempts were claims of workers that died before they started it.
                    claims = following.attempt - run.attempt
                    if claims <= 1:
                        self._rig.recoveries.append(took)
                    else:
                        claimed_in_vain.append(took)
                    if waited > loss.within * max(claims, 1):
                        slow.append(f"job {run.job} after {waited:.2f} s, not {loss.within:g}")
        if claimed_in_vain:
            self._rig.notes.append(
                f"claimed by a worker that was killed before the start: {len(claimed_in_vain)}, "
                f"{max(claimed_in_vain):.2f} s at most"
            )
        self._violate("a killed worker's job began again late", slow)

    def _turn_of(self, following: Run, since: float) -> float:
        """Return when it was the turn of an interrupted job, at the earliest at a moment.

        They run again one after the other, since one of them may be the killer.
        """
        if self._rig.recovers_at_once:
            return since
        ends = [
            again.ended
            for runs in self._runs.values()
            for again in runs[1:]
            if since < again.ended <= following.begun
        ]
        return max(ends, default=since)

    # -- I7, I8, I9 ----------------------------------------------------------

    def _nothing_is_claimed(self) -> None:
        claimed = [row for row in self._rows.values() if row["status"] == "running"]
        self._violate("I7 still claimed", claimed)

    def _the_log_is_clean(self) -> None:
        if self._rig.database != POSTGRES:
            return
        log = self._rig.server.log()
        if "deadlock detected" in log:
            self._rig.violate("I8 a deadlock was detected")
        lines = re.findall(r"^.*(?:ERROR|FATAL|PANIC):.*$", log, re.MULTILINE)
        expected = [re.compile(pattern) for pattern in (*ALWAYS_EXPECTED, *self._rig.expected_log)]
        odd = [line for line in lines if not any(one.search(line) for one in expected)]
        self._violate("I8 in the server's log", odd)

    def _workers_are_well(self) -> None:
        for tree in self._rig.trees:
            if not tree.is_alive:
                self._rig.violate(f"I9 runjobs {' '.join(tree.options)} has ended")
                continue
            before = self._rig.levels.get(tree)
            if before is None:
                continue
            after = level_of(tree)
            if after.descriptors > before.descriptors + SPARE_DESCRIPTORS:
                self._rig.violate(
                    f"I9 descriptors from {before.descriptors} to {after.descriptors}"
                )
            if after.rss_mib > before.rss_mib + SPARE_RSS_MIB:
                self._rig.violate(f"I9 MiB from {before.rss_mib:.0f} to {after.rss_mib:.0f}")
        if self._rig.database == POSTGRES:
            self._sessions_are_few()

    def _sessions_are_few(self) -> None:
        from myxo_jobs.handlers import registry

        threads = sum(handler.workers for handler in registry)
        processes = sum(len(tree.workers()) for tree in self._rig.trees)
        most = processes * (3 + threads) + len(self._rig.trees)
        self._rig.wait_until(
            lambda: connections_of_workers() <= most,
            because=f"the workers have at most {most} sessions",
            within=5,
        )


def _twice(values: list[str]) -> set[str]:
    return {value for value, times in Counter(values).items() if times > 1}


def may_fail(request: msgspec.Struct | dict[str, Any]) -> bool:
    """Tell whether a job of a request, or of a service's payload, may end as failed."""
    if isinstance(request, dict):
        return bool(request.get("may_fail"))
    if isinstance(request, Dirt):
        return request.what == "missing"
    return isinstance(request, (Poison, Zoo, Hang, AsyncHang)) or (
        isinstance(request, Stale) and request.then == "raises"
    )


def must_fail(request: msgspec.Struct, runs: list[Run]) -> bool:
    """Tell whether a job of a request cannot end as done after these runs."""
    if isinstance(request, (Poison, Zoo, Hang, AsyncHang)):
        return True
    if isinstance(request, Stale) and request.then == "raises":
        return runs[-1].attempt > 1
    return isinstance(request, Work) and max(run.attempt for run in runs) <= request.raises
