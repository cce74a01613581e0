"""A put wakes the workers by NOTIFY, after its commit, once for a transaction."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from django.db import connection, transaction
from django.test import TestCase

from myxo_jobs import Jobs, queue
from myxo_jobs.databases import Listener, database_of
from myxo_jobs.models import Job
from tests.app.jobs import Break, Work
from tests.databases.postgres.server import cut_all_sessions, straight_to_the_server
from tests.rig import in_threads

jobs = Jobs()
real = pytest.mark.django_db(transaction=True)


def never() -> bool:
    return False


def let_the_window_pass() -> None:
    """Wait until a put wakes the workers again, whatever was put before."""
    time.sleep(queue.WAKE_WINDOW_SECONDS * 1.2)


@pytest.fixture
def listener(transactional_db: None):
    """A listener that has not heard of anything yet, after the window of earlier puts.

    It goes to the server itself: behind a pooler nothing is heard.
    """
    let_the_window_pass()
    with straight_to_the_server():
        listener: Listener = database_of("default").listen("default")
    assert listener.hears(never)
    yield listener
    listener.close()


def test_a_put_is_heard(listener):
    jobs.put(Work("w"))

    assert listener.wait(5) == {"notes.Work"}


def test_a_put_is_heard_after_its_commit_and_not_before(listener):
    with transaction.atomic():
        jobs.put(Work("w"))
        assert listener.wait(0.2) == set()
    assert listener.wait(5) == {"notes.Work"}


def test_a_put_that_rolled_back_is_not_heard(listener):
    with transaction.atomic():
        jobs.put(Work("w"))
        transaction.set_rollback(True)
    assert listener.wait(0.2) == set()


def test_several_topics_of_a_transaction_are_one_wake_up(listener):
    with transaction.atomic():
        jobs.put(Work("w"))
        with transaction.atomic():
            jobs.put_many([Break("b"), Work("w")])

    assert listener.wait(5) == {"notes.Work", "notes.Break"}
    assert listener.wait(0.2) == set()


def test_a_retried_job_is_heard(listener, make_job):
    job = make_job(status="failed")
    jobs.retry(job.pk)

    assert listener.wait(5) == {job.topic}


def test_a_put_that_did_nothing_is_not_heard(listener, make_job):
    make_job(key="k")
    jobs.put(Work("w"), key="k")

    assert listener.wait(0.2) == set()


def test_wake_ups_in_a_short_window_are_one(listener):
    for number in range(20):
        jobs.put(Work(str(number)))

    assert listener.wait(5) == {"notes.Work"}
    heard = 0
    while listener.wait(0.1):
        heard += 1
    assert heard < 5


def test_with_autocommit_off_nothing_is_sent(listener):
    connection.set_autocommit(False)
    try:
        jobs.put(Work("w"))
        connection.commit()
    finally:
        connection.set_autocommit(True)
    assert listener.wait(0.2) == set()
    assert Job.objects.count() == 1


def test_a_listener_proves_that_it_hears(listener):
    assert listener.hears(never)
    assert listener.wait(0.1) == set()  # its own probe is no news


def test_a_listener_proves_that_it_hears_though_a_put_comes_before_its_probe(listener):
    for _ in range(3):
        jobs.put(Work("w"))
        assert listener.hears(never)
        let_the_window_pass()


def test_many_listeners_prove_themselves_at_once(transactional_db):
    def proves_itself() -> bool:
        with closing(database_of("default").listen("default")) as one:
            return one.hears(never) and one.wait(0.1) == set()

    with straight_to_the_server():
        assert in_threads(*[proves_itself] * 8) == [True] * 8


def test_a_wake_up_for_more_topics_than_a_notification_holds_is_for_all(listener):
    database_of("default").notify(connection, [f"topic {number:0200}" for number in range(100)])

    assert listener.wait(5) is None


@real
def test_the_wake_up_of_a_put_of_its_own_transaction_is_sent_at_once(listener):
    with transaction.atomic():
        jobs.put(Work("w"), tx=None)
        assert listener.wait(5) == {"notes.Work"}


@real
@pytest.mark.needs_a_session("its own session is cut")
def test_a_put_whose_wake_up_cannot_be_sent_raises_nothing(caplog):
    let_the_window_pass()
    with transaction.atomic():
        transaction.on_commit(cut_all_sessions)
        jobs.put(Work("w"))
    connection.close()

    assert "Error calling _WakeUp in on_commit()" in caplog.text
    assert Job.objects.count() == 1


class Callbacks(TestCase):
    def test_the_wake_up_is_one_callback_however_many_puts(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
            for number in range(3):
                jobs.put(Work(str(number)), key=str(number))
            jobs.put_many([Break("b"), Work("w")])
        assert len(callbacks) == 1

    def test_outside_a_block_each_put_has_its_own_as_each_is_a_transaction(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            jobs.put(Work("w"))
            jobs.put(Work("w"))
        assert len(callbacks) == 2

    def test_executing_the_callback_is_one_statement(self) -> None:
        time.sleep(queue.WAKE_WINDOW_SECONDS * 1.2)
        with self.captureOnCommitCallbacks() as callbacks:
            jobs.put(Work("w"))
        with self.assertNumQueries(1):
            callbacks[0]()

    def test_each_block_of_the_code_under_test_has_its_own(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            for _ in range(2):
                with transaction.atomic():
                    jobs.put(Work("w"))
                    jobs.put(Work("w"))
        assert len(callbacks) == 2

    def test_a_put_after_executed_callbacks_registers_one_again(self) -> None:
        for _ in range(2):
            with self.captureOnCommitCallbacks(execute=True) as callbacks:
                jobs.put(Work("w"))
            assert len(callbacks) == 1

    def test_a_savepoint_that_rolls_back_takes_its_wake_up_along_and_no_other(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
            with transaction.atomic():
                jobs.put(Work("undone"))
                transaction.set_rollback(True)
            jobs.put(Work("kept"))
        assert len(callbacks) == 1
