"""`@job`: what it takes, what it refuses, and that the function stays a function."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.core.exceptions import ImproperlyConfigured

from myxo_jobs import HandlerConflict, HandlerInvalid, PayloadInvalid, Run, job
from myxo_jobs.handlers import Handler, Registry, registry
from tests.app import jobs as app_jobs


class Ping(msgspec.Struct):
    number: int = 0


class Pong(msgspec.Struct):
    number: int = 0


class NoEq(msgspec.Struct, eq=False):
    number: int = 0


class Unreadable(msgspec.Struct):
    value: object | msgspec.Raw | complex


class Dangling(msgspec.Struct):
    value: Nowhere  # type: ignore[name-defined]  # noqa: F821


def test_the_decorated_function_stays_an_ordinary_function():
    def double(request: Ping) -> int:
        """Double it."""
        return request.number * 2

    assert job(Ping, topic="t")(double) is double
    assert double(Ping(4)) == 8


def test_an_async_function_stays_an_ordinary_coroutine_function():
    @job(Ping, topic="t")
    async def double(request: Ping) -> int:
        return request.number * 2

    assert asyncio.run(double(Ping(4))) == 8
    assert registry.of_topic("t").is_async


def test_what_is_not_declared_has_its_documented_default():
    @job(Ping, topic="t")
    def handle(request: Ping) -> None: ...

    handler = registry.of_topic("t")
    assert (handler.workers, handler.attempts, handler.lease, handler.backoff) == (1, 10, 30.0, 1.0)
    assert (handler.atomic, handler.keep, handler.priority) == (False, None, 0)
    assert (handler.takes_run, handler.is_async) == (False, False)


def test_a_topic_is_named_after_the_app_and_the_struct():
    assert registry.of_request(app_jobs.Work("x")).topic == "notes.Work"
    assert registry.of_topic("notes.Work").function is app_jobs.work


def test_a_handler_outside_every_app_must_name_its_topic():
    with pytest.raises(
        HandlerInvalid, match=r"tests\.test_handlers\..*handle.*topic must be given"
    ):

        @job(Ping)
        def handle(request: Ping) -> None: ...


def one(request: Ping) -> None: ...
def two(request: Ping, run: Run) -> None: ...
def with_default(request: Ping, depth: int = 5) -> None: ...
async def one_async(request: Ping) -> None: ...
def none() -> None: ...
def three(request: Ping, run: Run, more: int) -> None: ...
def keyword_only(request: Ping, *, needed: int) -> None: ...
def generator(request: Ping) -> Any:
    yield


async def async_generator(request: Ping) -> Any:
    yield


class CallableObject:
    def __call__(self, request: Ping) -> None: ...


@pytest.mark.parametrize(("function", "takes_run"), [(one, False), (two, True), (one_async, False)])
def test_a_handler_takes_the_request_and_perhaps_the_run(function, takes_run):
    job(Ping, topic="t")(function)

    assert registry.of_topic("t").takes_run is takes_run


@pytest.mark.parametrize(
    "function",
    [none, three, keyword_only, generator, async_generator, CallableObject(), Ping, None, len],
    ids=lambda function: getattr(function, "__name__", repr(type(function))),
)
def test_what_cannot_be_called_as_a_handler_is_refused(function):
    with pytest.raises(HandlerInvalid, match="a handler is"):
        job(Ping, topic="t")(function)
    assert registry.of_topic("t") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name, values in {
            "workers": [0, -1, 1.5, "2", True, None, float("nan")],
            "attempts": [0, -1, 1.5, "2", True, None],
            "lease": [0, -1, "2", True, None, float("nan"), float("inf"), 10**9],
            "backoff": [-1, "2", True, None, float("nan"), float("inf"), 10**9],
            "limit": [0, -1, 1.5, "2", True],
            "priority": [-101, 101, 1.0, "2", True, None],
            "atomic": [0, 1, "yes", None],
            "keep": [-1, "2", True, float("nan"), float("inf"), 10**10, timedelta(seconds=-1)],
            "topic": [
                "",
                5,
                b"t",
                "x" * 256,
                "a,b",
                " a",
                "a\n",
                "nul\x00",
                "a\nb",
                "a\x1b[2J",
                "a\x7fb",
            ],
        }.items()
        for value in values
    ],
    ids=repr,
)
def test_a_bad_argument_is_refused_by_name_and_place(name, value):
    with pytest.raises(HandlerInvalid, match=rf"test_handlers\.one: {name}") as caught:
        job(Ping, **{"topic": "t", name: value})(one)
    assert isinstance(caught.value, ImproperlyConfigured)
    assert isinstance(caught.value, ValueError)
    assert registry.of_topic("t") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 1000),
        ("attempts", 1),
        ("lease", 0.001),
        ("lease", 60),
        ("backoff", 0),
        ("keep", 0),
        ("keep", 86_400.0),
        ("priority", -100),
        ("priority", 100),
        ("topic", "x" * 255),
        ("topic", "größe: ein Wort"),
    ],
)
def test_an_argument_at_the_edge_is_taken(name, value):
    arguments = {"topic": "t", name: value}
    job(Ping, **arguments)(one)

    assert getattr(registry.of_topic(arguments["topic"]), name) == value


@pytest.mark.parametrize(
    "request_type", [NoEq, Unreadable, Dangling, int, dict, None, Ping(), "Ping"], ids=repr
)
def test_a_request_that_is_no_readable_comparable_struct_is_refused(request_type):
    with pytest.raises(HandlerInvalid, match=r"test_handlers\.one: request"):
        job(request_type, topic="t")(one)


def test_atomic_is_refused_for_an_async_handler():
    with pytest.raises(HandlerInvalid, match="atomic"):
        job(Ping, topic="t", atomic=True)(one_async)


def test_two_handlers_of_one_topic_are_refused_naming_both():
    job(Ping, topic="t")(one)
    with pytest.raises(
        HandlerConflict, match=r"topic 't': tests\.test_handlers\.one and tests\.test_handlers\.two"
    ) as caught:
        job(Pong, topic="t")(two)
    assert isinstance(caught.value, ImproperlyConfigured)


def test_two_handlers_of_one_struct_are_refused_naming_both():
    job(Ping, topic="t")(one)
    with pytest.raises(
        HandlerConflict, match=r"Ping: tests\.test_handlers\.one and tests\.test_handlers\.two"
    ):
        job(Ping, topic="u")(two)


def test_a_request_without_a_handler_is_named():
    for request in (Ping(), Ping, "text", None):
        with pytest.raises(PayloadInvalid, match="no handler for"):
            registry.of_request(request)


def test_handlers_declared_before_the_apps_are_ready_wait_for_them():
    early = Registry()
    handler = registry.of_topic("notes.Work")
    early.add(msgspec.structs.replace(handler, topic=""))

    assert list(early) == []
    early.open()
    assert [one.topic for one in early] == ["notes.Work"]


@pytest.mark.parametrize(
    ("backoff", "pauses"),
    [
        (1.0, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]),
        (0.0, [0] * 5),
        (100.0, [100, 200, 300, 300]),
        (1000.0, [1000, 1000, 1000]),
    ],
)
def test_the_pause_doubles_up_to_five_minutes_or_the_backoff(backoff, pauses):
    job(Ping, topic="t", backoff=backoff)(one)
    handler: Handler = registry.of_topic("t")

    assert [handler.pause_after(attempt) for attempt in range(1, len(pauses) + 1)] == pauses
    assert handler.pause_after(10**9) == pauses[-1]
