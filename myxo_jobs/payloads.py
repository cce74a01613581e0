"""A request and the text it is stored as; and any text, made storable.

A payload is the JSON of a msgspec Struct. A put refuses what would not come
back as it went in, so that a worker never meets a value that only looked right.
"""

from __future__ import annotations

import dataclasses
import math
import traceback as traceback_module
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from myxo_jobs.conf import settings
from myxo_jobs.errors import PayloadInvalid, PayloadTypeInvalid, ResultInvalid

ERROR_CHARACTERS = 2_000
TRACEBACK_BYTES = 16 * 1024
KEY_CHARACTERS = 255
RESULT_BYTES = 1024 * 1024


class Codec:
    """Writes and reads the payloads of one Struct."""

    def __init__(self, request: type[msgspec.Struct]) -> None:
        self.request = request
        self.name = request.__name__
        self._encode = msgspec.json.Encoder(enc_hook=_encode_other).encode
        self.decode_json = msgspec.json.Decoder(request).decode

    def encode(self, request: Any) -> str:
        """Return the payload of a request.

        Raises PayloadTypeInvalid for a value that JSON cannot hold and
        PayloadInvalid for one that would come back different, naming the field;
        and PayloadInvalid for a payload above the setting `payload_bytes`.
        """
        try:
            payload = self._encode(request)
            back = self.decode_json(payload)
            is_equal = back == request
        except TypeError as error:
            raise PayloadTypeInvalid(self._blame(request, error)) from error
        except Exception as error:  # a value's own methods may raise anything
            raise PayloadInvalid(self._blame(request, error)) from error
        if not is_equal:
            for path in _differences(request, back, "$"):
                raise PayloadInvalid(f"{self.name}: the value at {path} would come back different")
        limit = settings().payload_bytes
        if len(payload) > limit:
            raise PayloadInvalid(
                f"{self.name}: the payload has {len(payload):,} bytes, "
                f"MYXO_JOBS['payload_bytes'] allows {limit:,}; most are in "
                f"{self._largest_field(request)!r}: store the data elsewhere and put its key"
            )
        return payload.decode()

    def decode(self, payload: str) -> Any:
        """Return the request of a payload. Raises PayloadInvalid naming the path."""
        try:
            return self.decode_json(payload)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise PayloadInvalid(f"{self.name}: {error}") from error

    def _blame(self, request: Any, error: Exception) -> str:
        """Name the field that cannot be encoded, decoded or compared."""
        fields = msgspec.structs.fields(self.request)
        for check in (self._check_encoding, self._check_return):
            for field in fields:
                try:
                    check(getattr(request, field.name), field.type)
                except Exception as cause:
                    return f"{self.name}: field {field.name!r}: {cause}"
        return f"{self.name}: {error}"

    def _check_encoding(self, value: object, declared: Any) -> None:
        self._encode(value)

    def _check_return(self, value: object, declared: Any) -> None:
        bool(msgspec.json.decode(self._encode(value), type=declared) == value)

    def _largest_field(self, request: Any) -> str:
        names: tuple[str, ...] = request.__struct_fields__
        return max(names, key=lambda name: len(self._encode(getattr(request, name))))


class JsonCodec(Codec):
    """Writes and reads payloads without a Struct: dicts, lists and whatever else JSON has."""

    def __init__(self, name: str) -> None:
        super().__init__(msgspec.Struct)
        self.name = name
        self.decode_json = msgspec.json.Decoder(Any).decode

    def _blame(self, request: Any, error: Exception) -> str:
        path, cause = _unencodable(request, "$", error)
        return f"{self.name}: at {path}: {cause}"

    def _largest_field(self, request: Any) -> str:
        return _largest(request, "$")


def _encode_other(value: object) -> object:
    if isinstance(value, str):  # a subclass, such as SafeString
        return "".join((value, ""))
    raise TypeError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored as JSON; "
        "store its key or its text"
    )


_encode_result = msgspec.json.Encoder(enc_hook=_encode_other).encode


def encode_result(value: object) -> str | None:
    """Return what a handler returned as JSON text, None for None.

    Raises ResultInvalid, naming the place, for what JSON cannot hold and for over 1 MiB.
    """
    if value is None:
        return None
    try:
        encoded = _encode_result(value)
    except Exception as error:  # a value's own methods may raise anything
        path, reason = _unencodable(value, "$", error)
        raise ResultInvalid(f"the result cannot be stored, at {path}: {reason}") from error
    if b"null" in encoded:
        for path, number in _endless(value, "$"):
            raise ResultInvalid(f"the result cannot be stored, at {path}: JSON has no {number!r}")
    if len(encoded) > RESULT_BYTES:
        raise ResultInvalid(
            f"the result has {len(encoded):,} bytes, {RESULT_BYTES:,} are allowed; most are at "
            f"{_largest(value, '$')}: store the data elsewhere and return its key"
        )
    return encoded.decode()


def _endless(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield the floats that are no numbers, which would be stored as null, and where they are."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    for step, part in _steps(value):
        yield from _endless(part, path + step)


def _unencodable(value: object, path: str, error: Exception) -> tuple[str, Exception]:
    """Return where the innermost value is that cannot be encoded, and why it cannot."""
    for step, part in _steps(value):
        try:
            _encode_result(part)
        except Exception as cause:
            return _unencodable(part, path + step, cause)
    return path, error


def _largest(value: object, path: str) -> str:
    """Return the path of the part that most of an encoded value is in."""
    sizes = [(len(_encode_result(part)), step, part) for step, part in _steps(value)]
    size, step, part = max(sizes, key=lambda one: one[0], default=(0, "", None))
    return _largest(part, path + step) if size > RESULT_BYTES // 2 else path


def _steps(value: object) -> list[tuple[str, object]]:
    """Return what a value is made of, each part with the step to it; nothing for a leaf."""
    if isinstance(value, msgspec.Struct):
        return [(f".{name}", getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{one.name}", getattr(value, one.name)) for one in dataclasses.fields(value)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{place}]", part) for place, part in enumerate(value)]
    return []


def unknown_names(given: Mapping[Any, Any], struct: type[msgspec.Struct]) -> list[Any]:
    """Return the names that a Struct has no field of."""
    known = {field.encode_name for field in msgspec.structs.fields(struct)}
    known.add(struct.__struct_config__.tag_field or "")
    return [name for name in given if name not in known]


def unknown_fields(given: object, converted: object, path: str = "$") -> Iterator[tuple[str, Any]]:
    """Yield what a conversion has dropped, at any depth: (path, name)."""
    if isinstance(given, Mapping):
        yield from _unknown_in_mapping(given, converted, path)
    elif isinstance(given, (list, tuple)):
        if isinstance(converted, msgspec.Struct):  # one that is written as an array
            fields = converted.__struct_fields__
            tagged = converted.__struct_config__.tag is not None
            parts: list[Any] = [None] * tagged + [getattr(converted, name) for name in fields]
            yield from ((path, place) for place in range(len(parts), len(given)))
        else:
            parts = list(converted) if isinstance(converted, (list, tuple)) else []
        for place, (one, part) in enumerate(zip(given, parts, strict=False)):
            yield from unknown_fields(one, part, f"{path}[{place}]")


def _unknown_in_mapping(
    given: Mapping[Any, Any], converted: object, path: str
) -> Iterator[tuple[str, Any]]:
    if isinstance(converted, msgspec.Struct):
        kept = {
            field.encode_name: getattr(converted, field.name)
            for field in msgspec.structs.fields(converted)
        }
        yield from ((path, name) for name in unknown_names(given, type(converted)))
    elif dataclasses.is_dataclass(converted):
        kept = {one.name: getattr(converted, one.name) for one in dataclasses.fields(converted)}
        yield from ((path, name) for name in given if name not in kept)
    elif isinstance(converted, Mapping) and len(converted) == len(given):
        kept = dict(zip(given, converted.values(), strict=True))  # its keys may be of another type
    elif isinstance(converted, Mapping):  # a TypedDict
        kept = dict(converted)
        yield from ((path, name) for name in given if name not in kept)
    else:
        return
    for name, part in kept.items():
        if name in given:
            yield from unknown_fields(given[name], part, f"{path}.{name}")


def _differences(before: object, after: object, path: str) -> Iterator[str]:
    """Yield the paths at which two values differ."""
    parts = _parts(before, after)
    if parts is None:
        if not _is_same(before, after):
            yield path
    else:
        for step, one, other in parts:
            yield from _differences(one, other, path + step)


def _parts(before: object, after: object) -> list[tuple[str, Any, Any]] | None:
    """Return what two values of one shape are made of: (step, one, other); None for a leaf."""
    if type(before) is not type(after):
        return None
    if isinstance(before, msgspec.Struct):
        names = before.__struct_fields__
        return [(f".{name}", getattr(before, name), getattr(after, name)) for name in names]
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return [(f"[{key!r}]", before[key], after[key]) for key in before]
    if (
        isinstance(before, (list, tuple))
        and isinstance(after, (list, tuple))
        and len(before) == len(after)
    ):
        pairs = enumerate(zip(before, after, strict=True))
        return [(f"[{place}]", one, other) for place, (one, other) in pairs]
    return None


def _is_same(before: object, after: object) -> bool:
    """Compare two values, aware moments by instant.

    Python calls moments in a repeated hour unequal across zones
    (https://peps.python.org/pep-0495/).
    """
    if (
        isinstance(before, datetime)
        and isinstance(after, datetime)
        and before.tzinfo
        and after.tzinfo
    ):
        return before.astimezone(UTC) == after.astimezone(UTC)
    return bool(before == after)


def check_key(key: object) -> str:
    """Return a key as plain text. Raises TypeError or ValueError for one that cannot be stored."""
    if not isinstance(key, str):
        raise TypeError(f"key takes text, not {type(key).__name__}")
    if not 1 <= len(key) <= KEY_CHARACTERS:
        raise ValueError(f"key has {len(key)} characters; 1 to {KEY_CHARACTERS} are allowed")
    if "\x00" in key:
        raise ValueError("key contains a NUL character")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"key is not valid Unicode: {error}") from error
    return "".join((key, ""))


def storable(text: object, *, characters: int) -> str:
    """Return text that any database stores: no NUL, no lone surrogate, cut in the middle.

    Never raises, whatever `str(text)` does.
    """
    try:
        plain = str(text)
    except BaseException as error:  # an exception's __str__ may raise anything
        plain = f"<{type(text).__name__}, whose text raised {type(error).__name__}>"
    if len(plain) > characters:
        half = (characters - 5) // 2
        plain = f"{plain[:half]}\n…\n{plain[-half:]}"
    return plain.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def path_of(error: BaseException) -> str:
    """Return where the class of an exception is found: `module.Name`."""
    kind = type(error)
    return storable(f"{kind.__module__}.{kind.__qualname__}", characters=255)


def describe(error: BaseException) -> tuple[str, str]:
    """Return an exception as it is stored: `Type: message`, and its traceback.

    At most 2,000 characters and 16 KiB; never raises.
    """
    name = type(error).__name__
    message = storable(error, characters=ERROR_CHARACTERS - len(name) - 2)
    summary = f"{name}: {message}" if message else name
    try:
        lines = "".join(traceback_module.format_exception(error))
    except Exception as failure:  # an exception may break its own formatting
        lines = f"{summary}\n(its traceback could not be formatted: {type(failure).__name__})"
    trace = storable(lines, characters=TRACEBACK_BYTES)
    if len(trace.encode()) > TRACEBACK_BYTES:
        trace = storable(trace, characters=TRACEBACK_BYTES // 4)
    return summary[:ERROR_CHARACTERS], trace
