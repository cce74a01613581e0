"""What only PostgreSQL does: row locks, HOT updates, index scans."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, connections, transaction

from myxo_jobs import Jobs, queue
from myxo_jobs.databases import database_of
from myxo_jobs.databases.postgres import CLAIMS, DELETE_HELD, listed
from myxo_jobs.models import Job
from tests.app.jobs import Work
from tests.rig import ago, in_threads, wait_until

jobs = Jobs()
pytestmark = pytest.mark.django_db(transaction=True)


def fill(count: int, *, due_in: float = -60, topic: str = "receipts", priority: int = 0) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO myxo_jobs (topic, payload, priority, due) "
            "SELECT %s, '{}', %s, now() + %s * interval '1 second' FROM generate_series(1, %s)",
            [topic, priority, due_in, count],
        )


def query(sql: str, values: object = None) -> list[tuple]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall()


@pytest.fixture
def locked_elsewhere():
    """Lock rows, by id, in a transaction of another connection until the test ends."""
    ended, locked = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def lock(*ids: int) -> None:
        def hold() -> None:
            with transaction.atomic():
                list(Job.objects.select_for_update().filter(pk__in=ids))
                locked.set()
                ended.wait(30)
            connections.close_all()

        threads.append(threading.Thread(target=hold))
        threads[-1].start()
        assert locked.wait(10)

    yield lock
    ended.set()
    for thread in threads:
        thread.join()


def test_a_claim_passes_over_a_row_that_somebody_has_locked(make_job, claim_some, locked_elsewhere):
    first, second = make_job("receipts", due=ago(9)), make_job("receipts", due=ago(8))
    locked_elsewhere(first.pk)

    assert [claim.job_id for claim in claim_some("receipts")] == [second.pk]


@pytest.mark.parametrize("end", ["complete", "give_back", "renew"])
def test_the_end_of_a_claim_does_not_wait_for_a_locked_row(
    make_job, claim_some, locked_elsewhere, end
):
    for _ in range(3):
        make_job("receipts")
    claims = claim_some("receipts")
    locked_elsewhere(claims[1].job_id)

    ended = getattr(queue, end)(connection, claims)
    assert ended == {claims[0].job_id, claims[2].job_id}
    assert queue.still_held(connection, claims) >= {claims[1].job_id}


def test_the_end_of_a_claim_leaves_the_settings_of_its_session_as_they_were(make_job, claim_some):
    make_job("receipts")
    settings = "SELECT current_setting('lock_timeout'), current_setting('synchronous_commit')"
    for name, value in (("lock_timeout", "7s"), ("synchronous_commit", "on")):
        query("SELECT set_config(%s, %s, false)", [name, value])

    queue.complete(connection, claim_some("receipts"))

    try:
        assert query(settings) == [("7s", "on")]
    finally:
        connection.close()  # the next test gets a session without them


def hot_updates() -> tuple[int, int]:
    """Return how many updates of the table there were, and how many were HOT."""
    query("SELECT pg_stat_force_next_flush()")
    return query(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'myxo_jobs'"
    )[0]


def test_a_claim_a_renewal_and_a_give_back_update_no_index(claim_some):
    with connection.cursor() as cursor:  # as the migration does; --nomigrations has none
        for statement in database_of(connection).tune_table():
            cursor.execute(statement)
    fill(500)
    updates_before, hot_before = hot_updates()
    claims = claim_some("receipts", 500)
    queue.renew(connection, claims)
    queue.give_back(connection, claims)
    updates, hot = hot_updates()

    assert updates - updates_before == 1500
    # A page may be full now and then; an indexed column among those written would
    # leave none of them HOT.
    assert hot - hot_before > 1300


@pytest.mark.parametrize(
    ("on_suspect", "floored"), [("take", False), ("skip", False), ("skip", True)]
)
def test_a_claim_uses_the_index_and_reads_few_rows(claim_some, on_suspect, floored):
    fill(20_000, due_in=7 * 86400, priority=9)
    fill(20_000, due_in=7 * 86400)
    fill(2_000, topic="others")
    fill(1)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE myxo_jobs")
    values = {"topic": "receipts", "limit": 10, "lease": 30.0, "token": "t.1", "sent": ago(0)}
    values |= {"priorities": [9, 0], "floors": ["-infinity"] * 2}
    with transaction.atomic():
        plan = "\n".join(
            line
            for (line,) in query(
                "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) "
                + CLAIMS[on_suspect, True, floored, False],
                values,
            )
        )
        transaction.set_rollback(True)

    assert "myxo_jobs_claim" in plan
    assert "Seq Scan on myxo_jobs" not in plan
    assert len(claim_some("receipts", 10)) == 1


def test_a_look_at_many_topics_uses_the_index_alone():
    fill(20_000, due_in=7 * 86400)
    fill(1, topic="due")
    database = database_of(connection)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE myxo_jobs")
    query("SELECT pg_stat_force_next_flush()")
    before = query("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'myxo_jobs'")
    for _ in range(3):
        assert database.look(connection, dict.fromkeys(["receipts", "due", "none"]), 1.0) == {
            "due": 0.0
        }
    query("SELECT pg_stat_force_next_flush()")
    after = query("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'myxo_jobs'")
    assert after == before


def test_no_index_holds_a_column_that_a_claim_writes():
    written = {"worker", "lease_until", "attempts", "started_at", "status"}
    for name, definition in query(
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'myxo_jobs'"
    ):
        for column in written:
            assert column not in definition, f"{name}: {definition}"


def test_a_plain_job_stands_in_two_indexes_only():
    """Its id, and the claims' one: those of keys, of failed and of kept jobs are partial."""
    fill(100)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE myxo_jobs")
    filled = query(
        "SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class ON oid = indexrelid "
        "WHERE indrelid = 'myxo_jobs'::regclass AND reltuples > 0 ORDER BY 1"
    )
    assert filled == [("myxo_jobs_claim",), ("myxo_jobs_pkey",)]


# -- tx=None -------------------------------------------------------------------------


def test_a_put_of_its_own_transaction_outlives_a_rollback():
    with transaction.atomic():
        job_id = jobs.put(Work("own"), tx=None)
        joined = jobs.put(Work("joined"))
        assert in_threads(lambda: jobs.get(job_id))[0].pk == job_id
        transaction.set_rollback(True)

    assert jobs.get(job_id).status == "pending"
    assert jobs.get(joined) is None


def test_a_put_of_its_own_transaction_leaves_no_connection_behind():
    def sessions() -> int:
        return query(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend'"
        )[0][0]

    before = sessions()
    with transaction.atomic():
        for number in range(5):
            jobs.put(Work(str(number)), tx=None)
    wait_until(lambda: sessions() == before, because="the connections are closed")


def test_a_put_of_its_own_transaction_works_in_a_broken_block():
    with transaction.atomic():
        transaction.set_rollback(True)
        assert jobs.put(Work("own"), tx=None)
    assert Job.objects.count() == 1


def test_with_autocommit_off_a_put_of_its_own_transaction_commits():
    connection.set_autocommit(False)
    try:
        jobs.put(Work("own"), tx=None)
        assert in_threads(lambda: Job.objects.count()) == [1]
        connection.rollback()
    finally:
        connection.set_autocommit(True)
    assert Job.objects.count() == 1


def test_the_end_of_a_batch_compares_no_job_with_each_other_in_a_table_never_analyzed():
    fill(2_000)
    query("DELETE FROM pg_statistic WHERE starelid = 'myxo_jobs'::regclass RETURNING 1")
    ids = [job_id for (job_id,) in query("SELECT id FROM myxo_jobs ORDER BY id LIMIT 500")]
    values = listed([(job_id, "token") for job_id in ids])

    plan = "\n".join(line for (line,) in query(f"EXPLAIN {DELETE_HELD}", values))

    assert "Index Scan" in plan
    assert "Join" not in plan
    assert "Nested Loop" not in plan
