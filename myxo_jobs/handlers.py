"""`@job`, and the registry of what it declared."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

from myxo_jobs.errors import Cancelled, HandlerConflict, HandlerInvalid, PayloadInvalid, seconds_of
from myxo_jobs.payloads import Codec

# The pause before the next attempt doubles up to here.
LONGEST_BACKOFF_SECONDS = 300.0
LONGEST_OPTION_SECONDS = 31_536_000
LONGEST_KEEP_SECONDS = 100 * LONGEST_OPTION_SECONDS
LARGEST_NUMBER = sys.float_info.max
PRIORITIES = range(-100, 101)
TOPIC_CHARACTERS = 255

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Dials(msgspec.Struct, frozen=True):
    """What may be changed of a handler while workers run: see the fields of `Handler`."""

    keep: float | None
    limit: int | None  # 0 pauses the topic; also the slots that each worker process offers
    timeout: float | None


class Handler(msgspec.Struct, frozen=True, eq=False):
    """What `@job` declared: a function, the Struct it handles, and how its jobs run."""

    function: Callable[..., Any]
    request: type[msgspec.Struct]
    codec: Codec
    topic: str
    workers: int
    attempts: int
    lease: float
    backoff: float
    timeout: float | None
    atomic: bool
    priority: int
    takes_run: bool
    is_async: bool
    # How many seconds a done job stays, with its result; None: it leaves at once.
    keep: float | None = None
    # How many of its jobs may run at once in the whole deployment.
    limit: int | None = None
    # Called with a job's row: before that of a done one goes, and after a final failure.
    cleanup: Callable[[Any], object] | None = None
    # Of services, and not offered by `@job`. A failed job gives up its key, and expires as
    # a done one does.
    failed_gives_up_key: bool = False
    failed_expires: bool = False
    # Called with the connection and the job's id, in the transaction that stores the end of
    # a job, done or failed. The `Row` it returns, if any, is put in that transaction.
    at_outcome: Callable[[Any, int], Any] | None = None
    # Called with the job's row and what was raised, in the thread of the run, when a job
    # fails for good without words of its own; returns the message for its owner.
    explain: Callable[[Any, BaseException], str] | None = None
    # Called with a connection and topics, those of all handlers that have this very
    # function; returns what stands now for each of them.
    dials: Callable[[Any, Sequence[str]], Mapping[str, Dials]] | None = None
    # Its jobs are put by the name of their kind: no Struct belongs to it alone.
    by_name: bool = False
    # Whether its jobs may be asked to stop.
    cancellable: bool = True
    # A topic that whoever serves this one serves, too; empty: none.
    brings: str = ""
    # Called now and then by a worker that serves it, to remove what no row names.
    tidy: Callable[[], None] | None = None
    # Called with an alias and the result, as JSON text, of a run whose claim was lost before
    # that could be stored; removes what the run has stored elsewhere.
    undo: Callable[[str, str], None] | None = None

    @property
    def where(self) -> str:
        """The place a person finds the handler at: `module.function`."""
        return _where(self.function)

    @property
    def sees_off(self) -> bool:
        """Whether code of the project belongs to a final failure."""
        return self.cleanup is not None or self.explain is not None

    @property
    def failure_needs_a_worker(self) -> bool:
        """Whether more belongs to a final failure than the row tells, so that a worker which
        knows the handler has to store it."""
        return bool(
            self.sees_off or self.at_outcome or self.failed_expires or self.failed_gives_up_key
        )

    def turned(self, dials: Dials) -> Handler:
        """Return the handler as it is with these dials."""
        if dials == Dials(self.keep, self.limit, self.timeout):
            return self
        return msgspec.structs.replace(
            self, keep=dials.keep, limit=dials.limit, timeout=dials.timeout
        )

    def pause_after(self, attempt: int) -> float:
        """Return the seconds between the failure of an attempt and the next one.

        `backoff`, doubling with each attempt, up to 300 s or `backoff` if that is longer.
        """
        longest = max(LONGEST_BACKOFF_SECONDS, self.backoff)
        doublings = min(attempt - 1, 1000)  # 2.0 ** 1000 is still a float
        return min(self.backoff * 2.0**doublings, longest)


class Notes:
    """What a run of a kept job has noted of its progress.

    The handler's thread replaces `newest`, and others read it: no lock, since it is one value.
    """

    __slots__ = ("cancelled", "newest", "stored")

    def __init__(self) -> None:
        # (done, total, note), None before the first; and what of it stands in the row.
        self.newest: tuple[float, float | None, str] | None = None
        self.stored: tuple[float, float | None, str] | None = None
        # Whether somebody asked the run to stop.
        self.cancelled = False


class Run(msgspec.Struct, frozen=True, eq=False):
    """What a handler of (request, run) is told about the run it is."""

    id: int
    topic: str
    key: str | None
    attempt: int  # counted from 1
    max_attempts: int
    created_at: datetime
    # The name of a kept job towards its owner; a plain job has none.
    uid: str | None
    _is_stopping: Callable[[], bool]
    _extend: Callable[[float], None]
    _is_cancelled: Callable[[], bool]
    # Of the database that the job is in.
    _alias: str
    # Of the claim it runs under: the row's `worker` as long as that lasts.
    _token: str
    _notes: Notes | None = None

    @property
    def should_stop(self) -> bool:
        """Whether to stop early, by raising `Snooze(0)`: the worker drains, or `cancelled`."""
        return self._is_cancelled() or self._is_stopping()

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled the job."""
        return self._is_cancelled()

    def extend(self, seconds: float | timedelta) -> None:
        """Make the claim last at least so long from now; renewals never shorten it."""
        self._extend(seconds_of(seconds, "extend(seconds)"))

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Note how far the run is; `total` None if that is not known.

        Only notes it, so call it as often as you like: the newest is written into the row at
        most twice a second, and with the outcome. Raises ValueError for NaN, infinity and
        negative numbers, and Cancelled when somebody has cancelled the
        job. Nothing on a plain job, whose row is gone when it is done.
        """
        if self._notes is None:
            return
        try:
            fits = 0 <= done <= LARGEST_NUMBER and (total is None or 0 <= total <= LARGEST_NUMBER)
        except TypeError:
            raise TypeError(f"progress takes numbers, not {done!r} of {total!r}") from None
        if not fits:
            raise ValueError(f"progress takes numbers from 0, not {done!r} of {total!r}")
        self._notes.newest = (done, total, note if type(note) is str else str(note))
        if self._notes.cancelled:
            raise Cancelled

    def track(self, items: Iterable[T], total: float | None = None) -> Iterator[T]:
        """Yield the items, and note after each how many there were.

        The total is that of `count()` or `len()` where there is one, unless it is given.
        """
        if total is None and self._notes is not None:
            total = _count_of(items)
        done = 0
        self.progress(done, total)
        for item in items:
            yield item
            done += 1
            self.progress(done, total)


def _count_of(items: object) -> int | None:
    """Return how many items there are, without fetching those of a queryset."""
    if isinstance(items, Sized) and (isinstance(items, Sequence) or not hasattr(items, "count")):
        return len(items)
    try:
        count = items.count()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return len(items) if isinstance(items, Sized) else None
    return count if _is_whole(count) else None


class Registry:
    """Every handler of this process, by topic and by Struct.

    A topic that is not given is named after the app that holds the handler, so
    handlers declared while Django still loads its apps wait for `open`.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, Handler] = {}
        self._by_request: dict[type[object], Handler] = {}
        self._waiting: list[Handler] = []
        self._open = False

    def add(self, handler: Handler) -> None:
        if self._open:
            self._enter(handler)
        else:
            self._waiting.append(handler)

    def open(self) -> None:
        """Take in what was declared so far; from now on, each at once."""
        self._open = True
        waiting, self._waiting = self._waiting, []
        for handler in waiting:
            self._enter(handler)

    def of_topic(self, topic: str) -> Handler | None:
        return self._by_topic.get(topic)

    def of_request(self, request: object) -> Handler:
        """Return the handler of a request. Raises PayloadInvalid when it has none."""
        handler = self._by_request.get(type(request))
        if handler is None:
            raise PayloadInvalid(
                f"no handler for {type(request).__module__}.{type(request).__qualname__}: "
                "put an instance of a Struct that a function decorated with @job handles, "
                "in the `jobs` module of an installed app"
            )
        return handler

    def choose(
        self, topics: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, Handler]:
        """Return the handlers of some topics, all if None, without the excluded.

        Raises ImproperlyConfigured for a topic that has none, and when nothing is left.
        """
        if isinstance(topics, str) or isinstance(exclude, str):
            raise TypeError("topics and exclude take a list of topics, not one text")
        unknown = {*(topics or ()), *(exclude or ())} - self._by_topic.keys()
        if unknown:
            raise ImproperlyConfigured(
                f"no handler for topic {', '.join(sorted(unknown))}; "
                f"there are: {', '.join(sorted(self._by_topic)) or 'none'}"
            )
        wanted = self._by_topic if topics is None else topics
        chosen = {name: self._by_topic[name] for name in wanted if name not in (exclude or ())}
        brought = [handler.brings for handler in chosen.values() if handler.brings]
        chosen |= {name: self._by_topic[name] for name in brought if name in self._by_topic}
        if not chosen and self._by_topic:
            raise ImproperlyConfigured("no topic is left to serve: name one, or exclude fewer")
        return chosen

    def __iter__(self) -> Iterator[Handler]:
        return iter(list(self._by_topic.values()))

    def _enter(self, handler: Handler) -> None:
        if not handler.topic:
            handler = msgspec.structs.replace(handler, topic=_topic_of(handler))
        same_topic = self._by_topic.get(handler.topic)
        if same_topic is not None:
            raise HandlerConflict(f"topic {handler.topic!r}", same_topic.where, handler.where)
        same_request = None if handler.by_name else self._by_request.get(handler.request)
        if same_request is not None:
            raise HandlerConflict(
                f"Struct {handler.request.__qualname__}", same_request.where, handler.where
            )
        self._by_topic[handler.topic] = handler
        if not handler.by_name:
            self._by_request[handler.request] = handler


registry = Registry()


def job(
    request: type[msgspec.Struct],
    /,
    *,
    topic: str | None = None,
    workers: int = 1,
    attempts: int = 10,
    lease: float = 30.0,
    backoff: float = 1.0,
    timeout: float | None = None,
    atomic: bool = False,
    keep: float | timedelta | None = None,
    limit: int | None = None,
    priority: int = 0,
    cleanup: Callable[[Any], object] | None = None,
) -> Callable[[F], F]:
    """Declare a function as the handler of a Struct; it stays an ordinary function.

    `topic`: the stable name stored with each job, `<app_label>.<StructName>` by default.
    `workers`: how many of its jobs each worker process runs at once.
    `attempts`: how many runs a job gets before it stays, marked failed.
    `lease`: how many seconds a claim lasts; renewed while the job runs.
    `backoff`: seconds before attempt 2, doubling up to 300, or up to `backoff` if longer.
    `timeout`: how many seconds one run may take; then it is a failed attempt.
    `atomic`: run it in a transaction that commits together with the job's end.
    `keep`: how long a done job stays, with what the handler returned as its result.
    `limit`: how many of its jobs run at once, at most, in the whole deployment.
    `priority`: the default of its puts, −100 to 100; higher runs first, within the topic.
    `cleanup`: called with the job's row before that of a done one goes, and when a job has
    failed for good; it may be called again after a crash.

    Raises HandlerInvalid, naming the argument, when one cannot be used.
    """

    def declare(function: F) -> F:
        where = _where(function)
        _check_request(where, request)
        _check_topic(where, topic)
        _check_options(
            where,
            {
                "workers": workers,
                "attempts": attempts,
                "lease": lease,
                "backoff": backoff,
                "timeout": timeout,
                "atomic": atomic,
                "keep": keep,
                "limit": limit,
                "priority": priority,
                "cleanup": cleanup,
            },
        )
        takes_run, is_async = _check_function(where, function)
        if atomic and is_async:
            raise HandlerInvalid(where, "atomic is for plain functions, this one is async")
        try:
            codec = Codec(request)
        except (TypeError, NameError) as error:
            raise HandlerInvalid(where, f"request {request.__qualname__}: {error}") from error
        registry.add(
            Handler(
                function=function,
                request=request,
                codec=codec,
                topic=topic or "",
                workers=workers,
                attempts=attempts,
                lease=float(lease),
                backoff=float(backoff),
                timeout=None if timeout is None else float(timeout),
                atomic=atomic,
                priority=priority,
                takes_run=takes_run,
                is_async=is_async,
                keep=None if keep is None else seconds_of(keep, "keep"),
                limit=limit,
                cleanup=cleanup,
            )
        )
        return function

    return declare


def _where(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


def _topic_of(handler: Handler) -> str:
    config = apps.get_containing_app_config(handler.function.__module__)
    if config is None:
        raise HandlerInvalid(
            handler.where,
            "topic must be given, since no installed app contains this module",
        )
    return f"{config.label}.{handler.request.__name__}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= LONGEST_OPTION_SECONDS  # false for NaN
    )


def _is_time(value: Any) -> bool:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= LONGEST_KEEP_SECONDS  # false for NaN
    )


# What each option takes: a test, and the words for it.
OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "workers": (lambda value: _is_whole(value) and value >= 1, "a whole number from 1"),
    "attempts": (lambda value: _is_whole(value) and value >= 1, "a whole number from 1"),
    "lease": (lambda value: _is_seconds(value) and value > 0, "seconds above 0, up to a year"),
    "backoff": (_is_seconds, "seconds from 0, up to a year"),
    "timeout": (
        lambda value: value is None or (_is_seconds(value) and value > 0),
        "seconds above 0, up to a year, or None",
    ),
    "atomic": (lambda value: isinstance(value, bool), "True or False"),
    "keep": (
        lambda value: value is None or _is_time(value),
        "seconds or a timedelta from 0, up to a hundred years, or None",
    ),
    "limit": (
        lambda value: value is None or (_is_whole(value) and value >= 1),
        "a whole number from 1, or None",
    ),
    "priority": (
        lambda value: _is_whole(value) and value in PRIORITIES,
        "a whole number from -100 to 100",
    ),
    "cleanup": (
        lambda value: value is None or (callable(value) and not inspect.iscoroutinefunction(value)),
        "a plain function, or None",
    ),
}


def _check_options(where: str, options: dict[str, object]) -> None:
    for name, value in options.items():
        fits, wanted = OPTIONS[name]
        if not fits(value):
            raise HandlerInvalid(where, f"{name} takes {wanted}, not {value!r}")


def _check_request(where: str, request: object) -> None:
    if not (isinstance(request, type) and issubclass(request, msgspec.Struct)):
        raise HandlerInvalid(where, f"request takes a msgspec.Struct class, not {request!r}")
    if not request.__struct_config__.eq:
        raise HandlerInvalid(
            where, f"request {request.__qualname__} has eq=False, but a put compares"
        )


def _check_topic(where: str, topic: object) -> None:
    if topic is None:
        return
    if not (isinstance(topic, str) and topic and "\x00" not in topic):
        raise HandlerInvalid(where, f"topic takes text, not {topic!r}")
    if len(topic) > TOPIC_CHARACTERS:
        raise HandlerInvalid(
            where, f"topic has {len(topic)} characters, {TOPIC_CHARACTERS} are allowed"
        )
    if "," in topic or topic != topic.strip() or not topic.isprintable():
        raise HandlerInvalid(
            where,
            f"topic {topic!r} has a comma, outer spaces or a control character, "
            "which --topics cannot name",
        )


def _check_function(where: str, function: object) -> tuple[bool, bool]:
    """Return whether a handler takes a `run`, and whether it is async."""
    if not inspect.isfunction(function):
        raise HandlerInvalid(where, "a handler is a plain or async function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerInvalid(where, "a handler is a plain or async function, not a generator")
    positional = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    others_needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    if not positional or len(required) > 2 or others_needed:
        raise HandlerInvalid(where, "a handler is a function of (request) or (request, run)")
    return len(positional) > 1, inspect.iscoroutinefunction(function)
