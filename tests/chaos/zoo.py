"""What handlers raise, and do, that nobody should."""

from __future__ import annotations

from collections.abc import Callable

REFUSED = "the database refuses this error"


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def _raise(make: Callable[[], BaseException]) -> Callable[[], None]:
    def action() -> None:
        raise make()

    return action


def _cyclic() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    raise one


def _deep() -> None:
    _deep()


def _chained() -> None:
    error: Exception = ValueError("the first")
    for number in range(2_000):
        following = ValueError(f"number {number}")
        following.__cause__ = error
        error = following
    raise error


ANIMALS: dict[str, Callable[[], None]] = {
    "nul": _raise(lambda: ValueError("a \0 inside")),
    "surrogate": _raise(lambda: ValueError("half a pair \ud83d")),
    "invalid utf-8": _raise(lambda: ValueError(b"\xff\xfe".decode("utf-8", "surrogateescape"))),
    "10 MB": _raise(lambda: ValueError("x" * 10_000_000)),
    "mute": _raise(_MuteError),
    "cyclic cause": _cyclic,
    "bytes": _raise(lambda: ValueError(b"\xff\0\xfe")),
    "deep recursion": _deep,
    "long chain": _chained,
    "group": _raise(lambda: ExceptionGroup("many", [ValueError(str(n)) for n in range(1_000)])),
    "system exit": _raise(lambda: SystemExit(3)),
    "interrupt": _raise(KeyboardInterrupt),
    "generator exit": _raise(GeneratorExit),
    "base": _raise(lambda: BaseException("base")),
    "empty": _raise(ValueError),
    # Not for its text: a constraint that the scenario adds refuses the row.
    "refused": _raise(lambda: ValueError(REFUSED)),
}
