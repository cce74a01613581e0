"""`enqueue` puts a pending job in the caller's transaction, or refuses before any SQL."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy

from myxo_jobs import Jobs, PayloadInvalid, PayloadTypeInvalid
from myxo_jobs.models import Job
from myxo_jobs.services import JobService, enqueue, get_job, list_jobs, register
from tests.app.models import Note
from tests.rig import in_threads, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()


class Order(msgspec.Struct, frozen=True):
    note_id: int
    words: list[str] = []


@pytest.fixture(autouse=True)
def export() -> type[JobService]:
    @register
    class Export(JobService):
        kind = "export"
        priority = 7

        def process(self, job: Any) -> None: ...

    @register
    class Ordered(JobService):
        kind = "ordered"
        payload_type = Order

        def process(self, job: Any) -> None: ...

    return Export


def test_the_uid_is_valid_before_the_commit_and_the_same_to_the_end():
    seen_elsewhere: list[Any] = []
    with transaction.atomic():
        uid = enqueue("export", {"a": 1})
        assert get_job(uid).status == "pending"
        in_threads(lambda: seen_elsewhere.append(get_job(uid)))

    assert seen_elsewhere == [None]
    row = Job.objects.get()
    assert str(row.uid) == uid
    assert UUID(uid).version == 7
    assert (row.topic, row.kind, row.payload, row.status) == (
        "export",
        "export",
        '{"a":1}',
        "pending",
    )
    assert (row.priority, row.attempts, row.worker) == (7, 0, "")
    assert get_job(uid).payload == {"a": 1}
    assert get_job(UUID(uid)) == row


def test_a_rolled_back_enqueue_leaves_no_job():
    with transaction.atomic():
        uid = enqueue("export", {})
        transaction.set_rollback(True)

    assert get_job(uid) is None
    assert list(list_jobs()) == []


def test_a_delay_counts_from_the_statement():
    uid = enqueue("export", {}, delay=timedelta(hours=1))

    assert get_job(uid).due - timezone.now() > timedelta(minutes=59)


# -- owners ------------------------------------------------------------------------


def test_an_owner_is_a_user_or_any_saved_instance():
    user = User.objects.create_user("ada")
    note = Note.objects.create(text="x")
    mine = enqueue("export", {}, owner=SimpleLazyObject(lambda: user))
    its = enqueue("export", {}, owner=note)
    named = enqueue("export", {}, "auth.user", user.pk)

    assert (get_job(mine).owner_kind, get_job(mine).owner_id) == ("auth.user", str(user.pk))
    assert (get_job(its).owner_kind, get_job(its).owner_id) == ("notes.note", str(note.pk))
    assert {str(job.uid) for job in list_jobs(owner=user)} == {mine, named}
    assert {str(job.uid) for job in list_jobs(owner=("notes.note", note.pk))} == {its}
    nobodys = get_job(enqueue("export", {}))
    assert (nobodys.owner_kind, nobodys.owner_id) == (None, None)


@pytest.mark.parametrize(
    "arguments",
    [
        {"owner": AnonymousUser()},
        {"owner": User(username="unsaved")},
        {"owner": User(pk=7, username="unsaved")},
        {"owner": "ada"},
        {"owner_kind": "auth.user"},
        {"owner_kind": "auth.user", "owner_id": None},
        {"owner_id": "7"},
        {"owner_kind": "auth.user", "owner_id": "7\x00"},
        {"owner_kind": "auth.user", "owner_id": "x" * 256},
        {"owner_kind": "auth.user", "owner_id": "\ud800"},
    ],
    ids=repr,
)
def test_what_is_no_owner_is_a_value_error_before_any_sql(arguments):
    with CaptureQueriesContext(connection) as queries, pytest.raises(ValueError, match="owner"):
        enqueue("export", {}, **arguments)

    assert len(queries) == 0


# -- keys --------------------------------------------------------------------------


def test_with_a_key_one_job_is_put_while_it_waits_or_runs(claim_one):
    with transaction.atomic():
        first = enqueue("export", {"a": 1}, "auth.user", "1", key="all")
        assert enqueue("export", {"a": 2}, "auth.user", "1", key="all") == first
    claim_one("export")
    assert enqueue("export", {"a": 3}, "auth.user", "1", key="all") == first

    row = Job.objects.get()
    assert (row.key, row.payload) == ("export:auth.user:1:all", '{"a":1}')


def test_another_owner_or_kind_with_that_key_has_a_job_of_its_own():
    uids = {
        enqueue("export", {}, "auth.user", "1", key="all"),
        enqueue("export", {}, "auth.user", "2", key="all"),
        enqueue("export", {}, "auth.group", "1", key="all"),
        enqueue("export", {}, key="all"),
        enqueue("ordered", Order(1), "auth.user", "1", key="all"),
    }

    assert len(uids) == 5


def test_an_owner_whose_id_looks_like_anothers_key_is_not_told_of_their_job():
    theirs = enqueue("export", {}, "shop", "1", key="2:all")
    mine = enqueue("export", {}, "shop", "1:2", key="all")

    assert mine != theirs
    assert get_job(mine).owner_id == "1:2"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("k", "1:x", "y"), ("k", "1", "x:y")),
        (("k:1", "x", "y"), ("k", "1:x", "y")),
        (("k", "1\\", "x:y"), ("k", "1\\:x", "y")),
        (("k\\", "1", "y"), ("k", "\\:1", "y")),
    ],
    ids=repr,
)
def test_an_owner_with_a_colon_has_keys_of_their_own(one, other):
    first = [enqueue("export", {}, *one[:2], key=one[2]) for _ in range(2)]
    second = [enqueue("export", {}, *other[:2], key=other[2]) for _ in range(2)]

    assert first[0] == first[1] != second[0] == second[1]


def test_a_key_is_stored_readably():
    enqueue("export", {}, "auth.user", "7", key="all:2026")

    assert Job.objects.get().key == "export:auth.user:7:all:2026"


@pytest.mark.parametrize("status", ["done", "failed"])
def test_once_it_has_ended_the_next_one_is_put(status, make_job):
    key = "export:auth.user:1:all"
    make_job("export", status=status, key=key, owner_kind="auth.user", owner_id="1")

    uid = enqueue("export", {}, "auth.user", "1", key="all")
    assert get_job(uid).status == "pending"
    assert Job.objects.count() == 2
    assert enqueue("export", {}, "auth.user", "1", key="all") == uid


def test_ten_clicks_at_once_make_one_job():
    uids = in_threads(*[lambda: enqueue("export", {}, "auth.user", "1", key="all")] * 10)

    assert len(set(uids)) == 1
    assert Job.objects.count() == 1


def test_a_second_click_waits_for_the_first_ones_transaction():
    put, go_on = threading.Event(), threading.Event()
    uids: list[str] = []

    def first() -> None:
        with transaction.atomic():
            uids.append(enqueue("export", {}, key="all"))
            put.set()
            go_on.wait(10)

    def second() -> None:
        put.wait(10)
        threading.Timer(0.3, go_on.set).start()
        uids.append(enqueue("export", {}, key="all"))

    in_threads(first, second)
    assert len(set(uids)) == 1


@pytest.mark.parametrize(
    ("key", "error"),
    [("", ValueError), ("x" * 300, ValueError), ("x" * 250, ValueError), (7, TypeError)],
)
def test_a_key_that_cannot_be_stored_is_refused(key, error):
    with pytest.raises(error, match="key"):
        enqueue("export", {}, key=key)
    assert not Job.objects.exists()


# -- payloads ----------------------------------------------------------------------


def test_a_payload_type_takes_its_struct_or_a_dict_of_its_fields():
    for payload in (Order(3, ["a"]), {"note_id": 3, "words": ("a",)}):
        assert get_job(enqueue("ordered", payload)).payload == Order(3, ["a"])


@pytest.mark.parametrize(
    ("kind", "payload", "error", "named"),
    [
        ("ordered", {"note_id": "3"}, PayloadInvalid, "note_id"),
        ("ordered", {"words": []}, PayloadInvalid, "note_id"),
        ("ordered", {"note_id": 3, "wrods": []}, PayloadInvalid, "wrods"),
        ("ordered", {"note_id": object()}, PayloadTypeInvalid, "note_id"),
        ("ordered", Order("3"), PayloadInvalid, "note_id"),
        ("ordered", Order(3, [object()]), PayloadTypeInvalid, "words"),
        ("ordered", [3], PayloadInvalid, "Order .* not a list"),
        ("ordered", None, PayloadInvalid, "Order"),
        ("export", {"note": object()}, PayloadTypeInvalid, r"export: at \$\['note'\]"),
        ("export", {"at": timezone.now()}, PayloadInvalid, r"\$\['at'\]"),
        ("export", {"pair": (1, 2)}, PayloadInvalid, r"\$\['pair'\]"),
        ("export", {1: 2}, PayloadInvalid, r"export: the value at \$"),
        ("export", {"x": float("nan")}, PayloadInvalid, r"\$\['x'\]"),
        ("export", {"x": "\ud800"}, PayloadInvalid, r"\$\['x'\]"),
        ("export", {"x": "y" * 2**20}, PayloadInvalid, r"1,048,\d+ bytes.*\$\['x'\]"),
    ],
)
def test_a_wrong_payload_is_refused_naming_the_field_and_leaves_the_transaction_usable(
    kind, payload, error, named
):
    with transaction.atomic():
        with CaptureQueriesContext(connection) as queries, pytest.raises(error, match=named):
            enqueue(kind, payload)
        assert len(queries) == 0
        enqueue("export", [])

    assert Job.objects.count() == 1


@pytest.mark.parametrize("payload", [None, 3, "x", [1, None], {"a": {"b": [1.5, True, "\x00é"]}}])
def test_without_a_payload_type_what_json_has_comes_back_as_it_is(payload):
    assert get_job(enqueue("export", payload)).payload == payload


class Inner(msgspec.Struct, frozen=True):
    name: str
    size: int = 0


class Pair(msgspec.Struct, frozen=True, array_like=True):
    left: Inner
    right: int = 0


@dataclass(frozen=True)
class Plain:
    inner: Inner


class Outer(msgspec.Struct, frozen=True, rename="camel"):
    in_a_list: list[Inner] = []
    in_a_dict: dict[str, Inner] = {}
    alone: Inner | None = None
    pair: Pair | None = None
    plain: Plain | None = None


NESTED = [
    ({"inAList": [{"name": "a"}, {"name": "b", "sise": 1}]}, r"\$\.inAList\[1\].*'sise'"),
    ({"inADict": {"x": {"name": "a", "sise": 1}}}, r"\$\.inADict\.x.*'sise'"),
    ({"alone": {"name": "a", "sise": 1}}, r"\$\.alone.*'sise'"),
    ({"pair": [{"name": "a", "sise": 1}]}, r"\$\.pair\[0\].*'sise'"),
    ({"pair": [{"name": "a"}, 1, 2]}, r"\$\.pair: .* field 2"),
    ({"plain": {"inner": {"name": "a"}, "sise": 1}}, r"\$\.plain: .*'sise'"),
    ({"plain": {"inner": {"name": "a", "sise": 1}}}, r"\$\.plain\.inner.*'sise'"),
]


@pytest.mark.parametrize(("payload", "named"), NESTED, ids=[named for _, named in NESTED])
def test_a_field_that_a_nested_struct_does_not_have_is_refused_naming_its_place(payload, named):
    class Nested(JobService):
        kind = "nested"
        payload_type = Outer

        def process(self, job: Any) -> None: ...

    register(Nested)
    with pytest.raises(PayloadInvalid, match=named):
        enqueue("nested", payload)
    assert not Job.objects.exists()
    fits = {
        "inAList": [{"name": "a", "size": 1}, Inner("b")],
        "inADict": {"x": {"name": "a"}},
        "alone": {"name": "a"},
        "pair": [{"name": "a"}, 1],
        "plain": {"inner": {"name": "a"}},
    }
    a = Inner("a")
    assert get_job(enqueue("nested", fits)).payload == Outer(
        [Inner("a", 1), Inner("b")], {"x": a}, a, Pair(a, 1), Plain(a)
    )


def test_a_payload_is_its_struct_however_it_is_read():
    uid = enqueue("ordered", {"note_id": 3})
    rows = type(get_job(uid)).objects
    again = get_job(uid)
    again.refresh_from_db(fields=["payload"])

    found = [list_jobs()[0], again, rows.only("payload").get(), rows.defer("topic").get()]
    assert [row.payload for row in found] == [Order(3)] * 4


def test_a_payload_that_is_read_late_is_decoded_as_well():
    enqueue("ordered", Order(3, ["a"]))

    assert list_jobs().get().payload == Order(3, ["a"])


def test_a_tagged_payload_type_takes_a_dict_with_its_tag():
    class Tagged(msgspec.Struct, tag="one"):
        note_id: int

    class TaggedService(JobService):
        kind = "tagged"
        payload_type = Tagged

        def process(self, job: Any) -> None: ...

    register(TaggedService)

    assert get_job(enqueue("tagged", {"type": "one", "note_id": 3})).payload == Tagged(3)


def test_a_payload_that_no_longer_fits_is_still_shown(make_job):
    uid = enqueue("ordered", Order(3))
    Job.objects.update(payload='{"note_id":"three"}')
    assert get_job(uid).payload == {"note_id": "three"}
    Job.objects.update(payload="{")
    assert get_job(uid).payload == "{"


# -- what else is noted --------------------------------------------------------------


def test_the_active_language_and_zone_are_noted():
    with translation.override("de"), timezone.override("Europe/Berlin"):
        row = get_job(enqueue("export", {}))
    given = get_job(enqueue("export", {}, language="fr", time_zone="America/Lima"))

    assert (row.language, row.time_zone) == ("de", "Europe/Berlin")
    assert (given.language, given.time_zone) == ("fr", "America/Lima")


def test_a_zone_without_a_name_is_not_noted():
    with timezone.override(timezone.get_fixed_timezone(345)):
        assert get_job(enqueue("export", {})).time_zone is None


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("language", "d e", ValueError),
        ("language", "", ValueError),
        ("language", 7, TypeError),
        ("time_zone", "Mars/Olympus", ValueError),
        ("time_zone", "../../etc/passwd", ValueError),
        ("time_zone", "", ValueError),
        ("time_zone", 7, TypeError),
        ("delay", "soon", TypeError),
        ("delay", float("inf"), ValueError),
        ("preferred_name", 7, TypeError),
        ("owner_kind", 7, TypeError),
    ],
)
def test_an_argument_that_cannot_be_used_is_named_before_any_sql(name, value, error):
    with CaptureQueriesContext(connection) as queries, pytest.raises(error, match=name):
        enqueue("export", {}, **{name: value})

    assert len(queries) == 0


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("notes.csv", "notes.csv"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("a/b\\c.csv", "a_b_c.csv"),
        ("a\r\nb\x00\u202egpj.exe", "abgpj.exe"),
        ("  .hidden. ", "hidden"),
        ("Größe.csv", "Größe.csv"),
        ("é" * 300 + ".csv", "é" * 125 + ".csv"),
        ("x" * 300 + "." + "y" * 40, "x" * 255),
        ("...", None),
        ("\ud800", None),
        ("", None),
    ],
)
def test_the_name_for_the_download_is_cleaned_at_enqueue(given, stored):
    row = get_job(enqueue("export", {}, preferred_name=given))

    assert row.preferred_name == stored
    assert len((row.preferred_name or "").encode()) <= 255


def test_a_lazy_name_for_the_download_is_in_the_language_of_the_job():
    lazy = gettext_lazy("Yes")
    with translation.override("fr"):
        uids = [enqueue("export", {}, "", "", lazy, language=one) for one in (None, "de")]

    assert [get_job(uid).preferred_name for uid in uids] == ["Oui", "Ja"]


@pytest.mark.parametrize("owner", [("a",), (), ("a", "b", "c"), (None, 1), "ada"], ids=repr)
def test_what_is_no_owner_of_a_list_is_a_value_error_naming_the_argument(owner):
    with pytest.raises(ValueError, match="owner takes a user"):
        list_jobs(owner=owner)


def test_a_job_that_was_put_plainly_gets_its_uid_with_its_first_claim(worker):
    job_id = jobs_put_by_sql("export", {"a": 1})
    worker(topics=["export"])

    row = wait_until(
        lambda: Job.objects.filter(pk=job_id, status="done").first(), because="done", within=30
    )
    assert get_job(row.uid).payload == {"a": 1}


def jobs_put_by_sql(topic: str, payload: Any) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO myxo_jobs (topic, payload) VALUES (%s, %s) RETURNING id",
            [topic, json.dumps(payload)],
        )
        return int(cursor.fetchone()[0])
