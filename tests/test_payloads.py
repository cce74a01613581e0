"""What a put stores is what the handler gets; what would change is refused before any SQL."""

from __future__ import annotations

import enum
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from django.db import transaction
from django.test import override_settings
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext_lazy

from myxo_jobs import Jobs, PayloadInvalid, PayloadTypeInvalid, job
from myxo_jobs.handlers import registry
from myxo_jobs.models import Job
from myxo_jobs.payloads import describe, storable
from tests.app.models import Note

jobs = Jobs()


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


class Line(msgspec.Struct, frozen=True):
    article: str
    price: Decimal


class Order(msgspec.Struct, frozen=True):
    """One field for each kind of value that a request may hold."""

    moment: datetime
    local: datetime
    day: date
    hour: time
    pause: timedelta
    price: Decimal
    uid: UUID
    photo: bytes
    colour: Colour
    size: Size
    line: Line
    lines: list[Line]
    pair: tuple[int, str]
    words: dict[str, int]
    tags: frozenset[str]
    note: str | None
    missing: str | None = None


class Loose(msgspec.Struct):
    """A field that takes anything."""

    value: Any


class Text(msgspec.Struct):
    text: str


class Number(msgspec.Struct):
    number: float


ORDER = Order(
    moment=datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=ZoneInfo("Europe/Berlin")),
    local=datetime(2026, 3, 1, 12, 30, 15, 999999),
    day=date(2026, 2, 28),
    hour=time(23, 59, 59, 1),
    pause=timedelta(days=2, seconds=3, microseconds=4),
    price=Decimal("19.90"),
    uid=UUID("0190a5d2-7b3c-7def-8123-456789abcdef"),
    photo=bytes(range(256)),
    colour=Colour.RED,
    size=Size.SMALL,
    line=Line("tea", Decimal("3.50")),
    lines=[Line("cup", Decimal(7)), Line("pot", Decimal("1E+2"))],
    pair=(7, "seven"),
    words={"naïve": 1, "日本": 2},
    tags=frozenset({"a", "b"}),
    note="line\nbreak \x00 \u2028 😀 '\"\\%s%(x)s",
)


@pytest.fixture(autouse=True)
def handlers() -> None:
    for request in (Order, Loose, Text, Number):
        job(request, topic=f"zoo.{request.__name__}")(lambda request: None)


def stored(request: msgspec.Struct) -> Any:
    """Put a request and return what a worker reads from its row."""
    job_id = jobs.put(request)
    return registry.of_request(request).codec.decode(Job.objects.get(pk=job_id).payload)


@pytest.mark.django_db
def test_the_handler_gets_equal_values_of_the_same_types():
    back = stored(ORDER)

    assert back == ORDER
    for name in Order.__struct_fields__:
        assert type(getattr(back, name)) is type(getattr(ORDER, name)), name
    assert type(back.lines[1]) is Line
    assert str(back.lines[1].price) == "1E+2"
    assert back.moment.utcoffset() == timedelta(hours=1)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "text",
    ["", "\x00", "a\x00b", "\ud7ff\ue000", "\U0010ffff", "\x7f\x80\x85", "\r\n\t", "null", '"}'],
    ids=ascii,
)
def test_any_valid_text_comes_back_as_it_went_in(text):
    with transaction.atomic():
        back = stored(Text(text))
        assert Job.objects.count() == 1

    assert back == Text(text)


@pytest.mark.django_db
@pytest.mark.parametrize("fold", [0, 1])
def test_a_moment_in_a_repeated_hour_comes_back_as_the_same_instant(fold):
    moment = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    back = stored(Order(**{**msgspec.structs.asdict(ORDER), "moment": moment}))

    assert back.moment.astimezone(UTC) == moment.astimezone(UTC)
    assert back.moment.utcoffset() == moment.utcoffset()


@pytest.mark.django_db
@pytest.mark.parametrize(
    "moment",
    [
        datetime.min,
        datetime.max,
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=-12))),
        datetime(2026, 10, 25, 2, 30, fold=1),
    ],
    ids=str,
)
def test_moments_at_the_ends_of_the_calendar_come_back(moment):
    back = stored(Order(**{**msgspec.structs.asdict(ORDER), "moment": moment}))

    assert back.moment == moment
    assert (back.moment.tzinfo is None) == (moment.tzinfo is None)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "value",
    [None, True, "text", [], {}, [[{}]], 0.1, 5e-324, 1.7e308, 2**63, -(2**63) - 1, 10**400],
    ids=lambda value: repr(value)[:25],
)
def test_a_field_that_takes_anything_gives_back_what_json_knows(value):
    back = stored(Loose(value)).value

    assert back == value
    assert type(back) is type(value)


@pytest.mark.django_db
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: {"k": t}])
def test_a_subclass_of_str_is_stored_as_plain_text(wrap):
    class Shout(str):
        def __str__(self) -> str:
            return self.upper()

    for text in (mark_safe("a<b"), Shout("quiet")):
        back = stored(Loose(wrap(text))).value
        plain = str.__str__(text)
        assert back == wrap(plain)
        assert not isinstance(
            next(iter(back.values() if isinstance(back, dict) else back)), SafeString
        )


@pytest.mark.django_db
@pytest.mark.parametrize(
    "request_",
    [
        Number(float("nan")),
        Number(float("inf")),
        Loose(float("nan")),
        Loose({"deep": [float("-inf")]}),
        Loose((1, 2)),
        Loose({1, 2}),
        Loose(Decimal("1.5")),
        Loose(date(2026, 1, 1)),
        Loose(Colour.RED),
        Loose(b"bytes"),
        Loose({1: "a key that is no text"}),
        Loose(10**5000),
        Text("lone \ud800 surrogate"),
        Text(5),  # type: ignore[arg-type]
        Text(None),  # type: ignore[arg-type]
        Number("1.5"),  # type: ignore[arg-type]
    ],
    ids=lambda request: "big" if request == Loose(10**5000) else repr(request),
)
def test_a_value_that_would_come_back_different_is_refused_naming_its_field(
    request_, django_assert_num_queries
):
    field = request_.__struct_fields__[0]
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(ValueError, match=field) as caught:
            jobs.put(request_)
        assert isinstance(caught.value, PayloadInvalid)
        assert Note.objects.create(text="the transaction goes on").pk
    assert not Job.objects.exists()


@pytest.mark.django_db
def test_an_endless_value_is_refused():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    cyclic: list[Any] = []
    cyclic.append(cyclic)

    for value in (deep, cyclic):
        with pytest.raises(PayloadInvalid, match="value"):
            jobs.put(Loose(value))
    assert not Job.objects.exists()


class Touchy(msgspec.Struct):
    """Cannot be compared."""

    number: int = 0

    def __eq__(self, other: object) -> bool:
        raise KeyError("whatever")

    __hash__ = None  # type: ignore[assignment]


class Picky(msgspec.Struct):
    """Cannot be made again."""

    number: int = 0

    def __post_init__(self) -> None:
        if self.number:
            raise KeyError("whatever")


class Hard(msgspec.Struct):
    price: Decimal | None = None
    touchy: Touchy | None = None
    picky: Picky | None = None
    prices: list[Decimal] | None = None


def picky() -> Picky:
    made = Picky()
    made.number = 5
    return made


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("price", Decimal("sNaN")),
        ("prices", [Decimal(1), Decimal("sNaN")]),
        ("touchy", Touchy()),
        ("picky", picky()),
    ],
    ids=["price", "prices", "touchy", "picky"],
)
def test_a_value_whose_own_methods_raise_is_refused_naming_its_field(
    field, value, django_assert_num_queries
):
    job(Hard, topic="zoo.Hard")(lambda request: None)
    request = Hard(**{field: value})
    with django_assert_num_queries(0), pytest.raises(PayloadInvalid, match=f"field '{field}'"):
        jobs.put(request)
    with django_assert_num_queries(0), pytest.raises(PayloadInvalid, match=f"field '{field}'"):
        jobs.put_many([Hard(price=Decimal(1)), request])


@pytest.mark.django_db
@pytest.mark.parametrize(
    "make",
    [
        lambda: Note(text="a model instance"),
        lambda: Note.objects.all(),
        lambda: gettext_lazy("job"),
        lambda: Path(__file__).open(),  # noqa: SIM115
        lambda: object(),
        lambda: lambda: None,
        lambda: Exception("an exception"),
        lambda: 1j,
    ],
    ids=["model", "queryset", "lazy", "file", "object", "function", "exception", "complex"],
)
@pytest.mark.parametrize("request_type", [Loose, Text])
def test_a_value_that_json_cannot_hold_is_refused_naming_its_field(
    make: Callable[[], Any], request_type, django_assert_num_queries
):
    value = make()
    request = request_type(value)
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(TypeError) as caught:
            jobs.put(request)
        assert isinstance(caught.value, PayloadTypeInvalid)
        assert f"field {request_type.__struct_fields__[0]!r}" in str(caught.value)
        assert Note.objects.create(text="the transaction goes on").pk
    assert not Job.objects.exists()
    getattr(value, "close", lambda: None)()


@pytest.mark.django_db
def test_a_payload_above_the_limit_is_refused_naming_its_largest_field():
    longest = 1024 * 1024 - len('{"text":""}')
    assert jobs.put(Text("x" * longest))
    with pytest.raises(PayloadInvalid, match=r"1,048,577 bytes.*payload_bytes.*'text'"):
        jobs.put(Text("x" * (longest + 1)))
    with override_settings(MYXO_JOBS={"payload_bytes": 20}):
        assert jobs.put(Text("123456789"))
        with pytest.raises(PayloadInvalid, match="payload_bytes"):
            jobs.put(Text("12345é789"))  # as many characters, one byte more
    assert Job.objects.count() == 2


@pytest.mark.django_db
def test_a_payload_of_an_older_struct_is_read_by_the_newer_one():
    class Older(msgspec.Struct):
        text: str
        removed: int = 0

    class Newer(msgspec.Struct):
        text: str
        added: int = 7

    class Strict(msgspec.Struct):
        text: str
        required: int

    @job(Older, topic="zoo.Older")
    def older(request: Older) -> None: ...

    payload = Job.objects.get(pk=jobs.put(Older("x", 5))).payload
    for request in (Newer, Strict):
        job(request, topic=f"zoo.{request.__name__}")(lambda request: None)

    assert registry.of_topic("zoo.Newer").codec.decode(payload) == Newer("x", 7)
    with pytest.raises(PayloadInvalid, match=r"Strict.*`required`"):
        registry.of_topic("zoo.Strict").codec.decode(payload)


@pytest.mark.parametrize(
    "payload",
    ["", "{", "nul", "[]", '{"text": 5}', "{}", "\x00", '{"text": "\\ud800"}', "[" * 9**5],
)
def test_a_payload_that_does_not_decode_is_named_as_such(payload):
    with pytest.raises(PayloadInvalid, match=r"^Text: "):
        registry.of_topic("zoo.Text").codec.decode(payload)


# -- any text, made storable ---------------------------------------------------


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even its text")


def deep_error() -> BaseException:
    try:
        deep_error_again()
    except RecursionError as error:
        return error
    raise AssertionError


def deep_error_again() -> None:
    deep_error_again()


def cyclic_error() -> BaseException:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


ERRORS = {
    "plain": lambda: ValueError("plain"),
    "without text": lambda: KeyError(),
    "NUL": lambda: ValueError("a\x00b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "bytes": lambda: ValueError(b"\xff\x00"),
    "megabytes": lambda: ValueError("é" * 5_000_000),
    "text raises": UnspeakableError,
    "deep": deep_error,
    "cyclic": cyclic_error,
    "group": lambda: ExceptionGroup("a thousand", [ValueError(str(n)) for n in range(1000)]),
    "long name": lambda: type("E" * 5000, (Exception,), {})("x"),
}


@pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS)
@pytest.mark.django_db
def test_any_exception_can_be_stored_within_the_limits(make, make_job):
    raised = make()
    try:
        raise raised
    except BaseException as error:
        summary, trace = describe(error)

    assert summary.startswith(type(raised).__name__[:2000])
    assert len(summary) <= 2000
    assert len(trace.encode()) <= 16 * 1024
    row = make_job(status="failed", error=summary, traceback=trace)
    assert (row.error, row.traceback) == (summary, trace)


def test_a_long_text_keeps_its_head_and_its_tail():
    text = storable("head" + "x" * 10_000 + "tail", characters=1000)

    assert len(text) <= 1000
    assert text.startswith("headxxx")
    assert text.endswith("xxxtail")
    assert "…" in text
