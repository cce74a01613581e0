"""Random histories of everything that can be done to jobs, against a model in memory.

Each step is done to the table and to the model, and then the two must be the same. The
histories are the same ones in every run; MYXO_TEST_HISTORIES=1000 tries so many new ones.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any, Literal

import msgspec
import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from myxo_jobs import GiveUp, Jobs, Retry, Snooze, job, queue
from myxo_jobs.handlers import Handler, registry
from myxo_jobs.models import Job
from myxo_jobs.queue import Claim
from myxo_jobs.worker.running import Surroundings, run
from myxo_jobs.worker.settling import Settling
from tests.rig import ago

pytestmark = pytest.mark.django_db(transaction=True)

HISTORIES = 40
STEPS = 40
HOUR = 3600.0
ATTEMPTS = 3

jobs = Jobs()


class Quick(msgspec.Struct, frozen=True):
    """A request whose retries are due at once."""

    name: str


class Slow(msgspec.Struct, frozen=True):
    """A request whose retries are due in an hour."""

    name: str


TOPICS: dict[str, type[Quick] | type[Slow]] = {"t.Quick": Quick, "t.Slow": Slow}
BACKOFF = {"t.Quick": 0.0, "t.Slow": HOUR}

# What a handler does. It is set before each run.
End = Literal["returns", "raises", "gives up", "retries", "snoozes", "stops"]
ENDS: tuple[End, ...] = ("returns", "raises", "gives up", "retries", "snoozes", "stops")
_end: End = "returns"


def behave(request: msgspec.Struct) -> None:
    if _end == "raises":
        raise ValueError("as it was told")
    if _end == "gives up":
        raise GiveUp("as it was told")
    if _end == "retries":
        raise Retry(delay=HOUR)
    if _end == "snoozes":
        raise Snooze(HOUR)
    if _end == "stops":
        raise Snooze(0)


class ModelJob(msgspec.Struct):
    """A job as the promises have it."""

    topic: str
    payload: str
    key: str | None
    priority: int
    attempts: int = 0
    failed: bool = False
    token: str = ""
    is_over: bool = False  # its lease has ended, and nobody has claimed it since
    again: str | None = None
    is_due: bool = True

    @property
    def status(self) -> str:
        if self.failed:
            return "failed"
        return "running" if self.token else "pending"

    def release(self, attempts: int) -> bool:
        """End its claim; tell whether the run counts: no job was put again meanwhile."""
        counts = self.again is None
        self.attempts = attempts if counts else 0
        self.payload = self.again or self.payload
        self.token, self.is_over, self.again = "", False, None
        return counts


requests = st.builds(
    lambda kind, name: kind(name), st.sampled_from([Quick, Slow]), st.sampled_from("abcdef")
)
keys = st.sampled_from([None, "one", "two", "three"])
priorities = st.sampled_from([None, -1, 5])
delays = st.sampled_from([None, None, HOUR])
topics = st.sampled_from(sorted(TOPICS))
ends = st.sampled_from(ENDS)
picks = st.integers(0, 2**16)


def topic_of(request: msgspec.Struct) -> str:
    return f"t.{type(request).__name__}"


def payload_of(request: msgspec.Struct) -> str:
    return msgspec.json.encode(request).decode()


class History(RuleBasedStateMachine):
    """The table and its model."""

    def __init__(self) -> None:
        super().__init__()
        Job.objects.all().delete()
        self.model: dict[int, ModelJob] = {}
        self.due: dict[int, datetime] = {}
        # Claims of all workers, those that ended or were lost too: a worker may be late.
        self.claims: list[Claim] = []
        self.tokens = queue.Tokens()

    # -- put -----------------------------------------------------------------

    @rule(request=requests, key=keys, priority=priorities, delay=delays, again=st.booleans())
    def put(self, request: Any, key: Any, priority: Any, delay: Any, again: bool) -> None:
        job_id = jobs.put(request, key=key, priority=priority, delay=delay, again=again)
        self._expect_put(job_id, request, key, priority, delay, again)

    @rule(puts=st.lists(st.tuples(requests, keys), min_size=1, max_size=3), undone=st.booleans())
    def put_in_a_transaction_that_rolls_back(self, puts: Any, undone: bool) -> None:
        """All of it, or a part: then what was put before that part stays."""
        first, *rest = puts
        with transaction.atomic():
            kept = None if undone else jobs.put(first[0], key=first[1])
            with transaction.atomic():
                for request, key in puts if undone else rest:
                    jobs.put(request, key=key, again=True)
                transaction.set_rollback(True)
        if not undone:
            self._expect_put(kept, first[0], first[1], None, None, False)

    @rule(puts=st.lists(st.tuples(requests, keys), max_size=4), priority=priorities, delay=delays)
    def put_many(self, puts: Any, priority: Any, delay: Any) -> None:
        keys_in_order = iter([key for _, key in puts])
        count = jobs.put_many(
            [request for request, _ in puts],
            key=lambda request: next(keys_in_order),
            priority=priority,
            delay=delay,
        )
        new = [(request, key) for place, (request, key) in enumerate(puts)
               if key is None or (self._holder(key) is None
                                  and key not in [other for _, other in puts[:place]])]  # fmt: skip
        assert count == len(new)
        ids = Job.objects.exclude(pk__in=self.model).order_by("pk").values_list("pk", flat=True)
        for job_id, (request, key) in zip(ids, new, strict=True):
            self._expect_put(job_id, request, key, priority, delay, False)

    def _expect_put(
        self, job_id: int | None, request: Any, key: Any, priority: Any, delay: Any, again: bool
    ) -> None:
        holder = None if key is None else self._holder(key)
        if holder is None:
            assert job_id is not None
            assert job_id not in self.model
            self.model[job_id] = ModelJob(
                topic_of(request), payload_of(request), key, priority or 0, is_due=not delay
            )
            return
        there = self.model[holder]
        if not again or there.failed or there.topic != topic_of(request):
            assert job_id is None
            return
        assert job_id == holder
        if there.token:
            there.again = payload_of(request)
        else:
            there.payload = payload_of(request)

    def _holder(self, key: str) -> int | None:
        return next((job_id for job_id, one in self.model.items() if one.key == key), None)

    # -- workers -------------------------------------------------------------

    @rule(topic=topics, limit=st.integers(1, 4))
    def claim(self, topic: str, limit: int) -> None:
        token = self.tokens.next()
        claims = queue.claim(connection, handler_of(topic), limit, token=token)
        assert [claim.job_id for claim in claims] == self._claimable(topic, limit)
        for claim in claims:
            one = self.model[claim.job_id]
            assert claim.suspect == one.is_over
            one.attempts = one.attempts + 1 if one.again is None else 1
            one.payload, one.again = one.again or one.payload, None
            one.token, one.is_over = token, False
            assert (claim.payload, claim.attempt) == (one.payload, one.attempts)
        self.claims += claims

    def _claimable(self, topic: str, limit: int) -> list[int]:
        """Return what stands first in the line: up to a suspect, which is claimed alone."""
        line = [
            job_id
            for job_id, one in self.model.items()
            if one.topic == topic
            and not one.failed
            and one.is_due
            and (not one.token or one.is_over)
        ]
        line.sort(key=lambda job_id: (-self.model[job_id].priority, self.due[job_id], job_id))
        line = line[:limit]
        for place, job_id in enumerate(line):
            if self.model[job_id].is_over:
                return line[: max(place, 1)]
        return line

    @precondition(lambda self: self.claims)
    @rule(pick=picks, end=ends)
    def run_to_its_end(self, pick: int, end: End) -> None:
        """Let a worker run a job and store the outcome, in time or late."""
        global _end
        claim = self.claims[pick % len(self.claims)]
        _end = end
        settling = Settling(lambda claim: None, lambda outcome: None, lambda outcome: None)
        settling.add([run(claim, AROUND)])
        settling.store(connection)
        assert settling.is_empty()
        one = self.model.get(claim.job_id)
        if one is not None and one.token == claim.token:
            self._expect_end(claim, one, end)

    def _expect_end(self, claim: Claim, one: ModelJob, end: End) -> None:
        if claim.suspect and claim.attempt > ATTEMPTS:  # which killed every worker so far
            one.failed = one.release(one.attempts - 1)
        elif end == "returns":
            if one.again is None:
                del self.model[claim.job_id]
            else:
                one.release(0)
        elif end == "gives up" or (end in ("raises", "retries") and claim.attempt >= ATTEMPTS):
            one.failed = one.release(one.attempts)
        elif end == "retries" or (end == "raises" and BACKOFF[one.topic]):
            one.is_due = not one.release(one.attempts)
        elif end == "raises":
            one.release(one.attempts)
            del self.due[claim.job_id]  # it has a new place in the line
        elif end == "snoozes":
            one.is_due = not one.release(max(one.attempts - 1, 0))
        else:
            one.release(max(one.attempts - 1, 0))

    @precondition(lambda self: self.claims)
    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        claim = self.claims[pick % len(self.claims)]
        held = [
            job_id for job_id in (claim.job_id,)
            if job_id in self.model and self.model[job_id].token == claim.token
        ]  # fmt: skip
        assert queue.renew(connection, [claim]) == set(held)
        for job_id in held:
            self.model[job_id].is_over = False

    @precondition(lambda self: any(one.token for one in self.model.values()))
    @rule(pick=picks)
    def a_lease_ends(self, pick: int) -> None:
        claimed = [job_id for job_id, one in self.model.items() if one.token]
        job_id = claimed[pick % len(claimed)]
        Job.objects.filter(pk=job_id).update(lease_until=ago(5))
        self.model[job_id].is_over = True

    @precondition(lambda self: any(not one.is_due for one in self.model.values()))
    @rule(pick=picks)
    def a_delay_ends(self, pick: int) -> None:
        waiting = [job_id for job_id, one in self.model.items() if not one.is_due]
        job_id = waiting[pick % len(waiting)]
        Job.objects.filter(pk=job_id).update(due=ago(60))
        self.model[job_id].is_due = True
        del self.due[job_id]

    # -- a person ------------------------------------------------------------

    @precondition(lambda self: self.model)
    @rule(picked=st.lists(picks, min_size=1, max_size=3))
    def retry(self, picked: list[int]) -> None:
        """Run failed jobs again, among others that have not failed."""
        ids = self._choose(picked)
        failed = {job_id for job_id in ids if self.model[job_id].failed}
        assert queue.retry_failed("default", ids) == failed
        for job_id in failed:
            one = self.model[job_id]
            one.failed, one.attempts, one.is_due = False, 0, True

    @precondition(lambda self: self.model)
    @rule(pick=picks)
    def discard(self, pick: int) -> None:
        (job_id,) = self._choose([pick])
        assert jobs.discard(job_id)
        assert not jobs.discard(job_id)
        del self.model[job_id]

    def _choose(self, picked: list[int]) -> list[int]:
        ids = list(self.model)
        return sorted({ids[pick % len(ids)] for pick in picked})

    # -- the two are the same -------------------------------------------------

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        super().check_invariants(*args, **kwargs)
        columns = ("topic", "payload", "key", "priority", "attempts", "failed", "worker", "again")
        rows = {row["pk"]: row for row in Job.objects.values("pk", "status", "due", *columns)}
        soon = ago(-60)  # delays are of an hour
        assert rows.keys() == self.model.keys()
        for job_id, row in rows.items():
            one = self.model[job_id]
            expected = (*(getattr(one, name) for name in columns[:6]), one.token, one.again)
            assert tuple(row[name] for name in columns) == expected
            assert row["status"] == one.status
            assert (row["due"] <= soon) == one.is_due
            # A claim, a renewal and a give-back leave its place in the line.
            if one.is_due:
                assert self.due.setdefault(job_id, row["due"]) == row["due"]
            else:
                self.due[job_id] = row["due"]
        self.due = {job_id: due for job_id, due in self.due.items() if job_id in rows}


AROUND = Surroundings(
    alias="default",
    is_stopping=lambda: False,
    extend=lambda claim, seconds: None,
    limits=None,
    starts=lambda claim: None,
)


def handler_of(topic: str) -> Handler:
    handler = registry.of_topic(topic)
    assert handler is not None
    return handler


def test_every_history_ends_as_the_promises_say():
    for topic, request in TOPICS.items():
        job(
            request,
            topic=topic,
            attempts=ATTEMPTS,
            backoff=BACKOFF[topic],
            lease=HOUR,
        )(behave)
    deeper = os.environ.get("MYXO_TEST_HISTORIES")
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=int(deeper or HISTORIES),
            stateful_step_count=STEPS,
            derandomize=not deeper,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
