"""The rooms of the package, in reading order: each imports only rooms named before it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import myxo_jobs

PACKAGE = Path(myxo_jobs.__file__).parent

ROOMS = [
    "errors",
    "conf",
    "payloads",
    "logs",
    "handlers",
    "models",
    "databases",
    "queue",
    "worker",
    "jobs",
    "services",
    "templatetags",
    "testing",
    "checks",
    "admin",
    "management",
]
# These stand outside the order: the front door names what is public, the app config
# opens the registry at start-up, and migrations are written once and kept.
OUTSIDE = {"__init__", "apps", "migrations"}


def room_of(module: str) -> str | None:
    """Return the room of a module of the package; None for another package's module."""
    parts = module.split(".")
    if parts[0] != "myxo_jobs":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def imports() -> Iterator[tuple[str, str, str, bool]]:
    """Yield every import, in functions and under TYPE_CHECKING too.

    As (room, imported room or package, place, whether it stands at the module's top).
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            place = f"{relative}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{place}: a relative import"
                module = node.module or ""
                names = [
                    f"{module}.{a.name}" if module == "myxo_jobs" else module for a in node.names
                ]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                yield room, room_of(name) or name.split(".")[0], place, node in tree.body


def test_every_module_has_its_room():
    found = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix in ("", ".py")
    }
    found -= {"__pycache__", "templates", "static", "locale"}

    assert found - OUTSIDE == set(ROOMS)


def test_a_room_imports_only_rooms_named_before_it():
    upward = [
        f"{place} imports {imported}"
        for room, imported, place, _ in imports()
        if room in ROOMS
        and imported in (*ROOMS, *OUTSIDE)
        and imported != room
        and not (imported in ROOMS and ROOMS.index(imported) < ROOMS.index(room))
    ]

    assert upward == []


def test_rooms_that_are_imported_before_the_apps_are_ready_import_no_model():
    """A project makes its `Jobs` and declares its handlers where it likes, so what the
    front door names meets the models only inside the calls that need them."""
    early = {"__init__", "errors", "conf", "payloads", "handlers", "jobs"}
    at_top = [
        f"{place} imports {imported}"
        for room, imported, place, top in imports()
        if room in early and top and imported in ROOMS and imported not in early
    ]

    assert at_top == []


def test_psycopg_is_imported_only_for_postgresql():
    users = {place.split(":")[0] for _, imported, place, _ in imports() if imported == "psycopg"}

    assert users == {"databases/postgres.py"}


def test_the_front_door_opens_without_settings_and_without_psycopg():
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from myxo_jobs import *\n"
        "from myxo_jobs import CALLER, Jobs, job\n"
        "jobs = Jobs()\n"
        "from django.conf import settings\n"
        "assert not settings.configured\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, env={}, timeout=60)
