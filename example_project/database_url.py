"""DATABASE_URL, read with nothing but the standard library."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

FORMS = (
    "postgres://user:password@host:port/name, "
    "postgres://user@/name?host=/folder/of/the/socket, or sqlite:///file"
)


class DatabaseUrlInvalid(ImproperlyConfigured):
    """DATABASE_URL does not name a database.

    The message does not repeat the address, since it may hold a password.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"DATABASE_URL {what}; it is written {FORMS}")


def database(url: str, folder: Path) -> dict[str, Any]:
    """Return the entry of DATABASES for an address.

    A relative SQLite file is one in `folder`. Raises DatabaseUrlInvalid.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise DatabaseUrlInvalid(f"cannot be read: {error}") from None
    name = unquote(parts.path.removeprefix("/"))
    if parts.scheme == "sqlite":
        return _sqlite(parts, folder / name)
    if parts.scheme not in ("postgres", "postgresql"):
        raise DatabaseUrlInvalid(f"begins with {parts.scheme!r}")
    if not name:
        raise DatabaseUrlInvalid("names no database")
    options = dict(parse_qsl(parts.query))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": options.pop("host", unquote(parts.hostname or "")),
        "PORT": options.pop("port", str(port or "")),
        "OPTIONS": options,
    }


def _sqlite(parts: SplitResult, file: Path) -> dict[str, Any]:
    if parts.netloc or parts.path in ("", "/"):
        raise DatabaseUrlInvalid("names no file: there are three slashes before it")
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": file,
        "OPTIONS": {
            # Readers do not wait for the writer, nor the writer for them.
            "init_command": "PRAGMA journal_mode = WAL",
            # A block takes the write lock when it begins, and waits for it there.
            # Otherwise one that reads before it writes can be refused at once.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
        },
    }
