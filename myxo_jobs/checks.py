"""What `manage.py check` says about a project: each with an id and what to do.

Those tagged `databases` look at a database, so they run only where Django is told
which ones (`check --database`, `migrate`). No other connects. `runjobs` refuses to start
on those that keep its jobs from being done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags
from django.core.files.storage import FileSystemStorage, Storage, storages
from django.core.management import get_commands
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader

from myxo_jobs import conf, queue
from myxo_jobs.databases import is_supported
from myxo_jobs.errors import SettingsInvalid
from myxo_jobs.handlers import Handler, registry
from myxo_jobs.models import Job
from myxo_jobs.services.service import services

APP = "myxo_jobs"
# psycopg_pool's own default for a pool without a size.
POOL_SIZE = 4


def register() -> None:
    for check in (
        check_settings,
        check_runjobs,
        check_vendor,
        check_transaction_mode,
        check_memory,
        check_pool,
        check_rangefilter,
        check_route,
        check_storages,
        check_kinds,
    ):
        checks.register(check, APP)
    checks.register(check_private_storage, APP, deploy=True)
    for check in (check_journal_mode, check_table):
        checks.register(check, Tags.database)


# -- read from the settings ------------------------------------------------------


def check_settings(**kwargs: Any) -> list[CheckMessage]:
    try:
        conf.settings()
    except SettingsInvalid as error:
        return [
            Error(
                str(error),
                hint="Correct the name or the value in MYXO_JOBS.",
                id="myxo_jobs.E001",
            )
        ]
    return []


def check_vendor(**kwargs: Any) -> list[CheckMessage]:
    alias = queue.alias()
    connection = connections[alias]
    if is_supported(connection):
        return []
    return [
        Error(
            f"The jobs are routed to the database {alias!r}, which is {connection.vendor}; "
            "they can be kept in PostgreSQL or SQLite.",
            hint="Use one of those, or let a database router send the app myxo_jobs to one.",
            id="myxo_jobs.E002",
        )
    ]


def check_runjobs(**kwargs: Any) -> list[CheckMessage]:
    owner = get_commands().get("runjobs", APP)
    if owner == APP:
        return []
    return [
        Error(
            f"`manage.py runjobs` is the command of {owner}, so that no worker would start.",
            hint=f'List "myxo_jobs" before "{owner}" in INSTALLED_APPS.',
            id="myxo_jobs.E003",
        )
    ]


def check_transaction_mode(**kwargs: Any) -> list[CheckMessage]:
    alias = queue.alias()
    connection = connections[alias]
    mode = connection.settings_dict["OPTIONS"].get("transaction_mode") or "DEFERRED"
    if connection.vendor != "sqlite" or mode.upper() != "DEFERRED":
        return []
    return [
        checks.Warning(
            f"The SQLite database {alias!r} does not begin its transactions with IMMEDIATE: "
            "beside any second writer, such as a worker, a block that reads before it writes "
            "can be refused at once with “database is locked”. No job is lost by it.",
            hint=f'Set DATABASES[{alias!r}]["OPTIONS"]["transaction_mode"] = "IMMEDIATE".',
            id="myxo_jobs.W001",
        )
    ]


def check_memory(**kwargs: Any) -> list[CheckMessage]:
    return memory(queue.alias())


def check_pool(**kwargs: Any) -> list[CheckMessage]:
    return pool_too_small(queue.alias(), connections_needed(registry))


def check_rangefilter(**kwargs: Any) -> list[CheckMessage]:
    if not apps.is_installed("django.contrib.admin") or apps.is_installed("rangefilter"):
        return []
    return [
        checks.Warning(
            "The job list of the admin filters by dates with django-admin-rangefilter, "
            "which is not among the installed apps.",
            hint='Add "rangefilter" to INSTALLED_APPS.',
            id="myxo_jobs.W005",
        )
    ]


def check_route(**kwargs: Any) -> list[CheckMessage]:
    alias = queue.alias()
    others = {
        router.db_for_write(model)
        for config in apps.get_app_configs()
        if config.name != APP and not config.name.startswith("django.")
        for model in config.get_models()
    } or {DEFAULT_DB_ALIAS}
    if alias in others:
        return []
    names = ", ".join(repr(other) for other in sorted(others))
    return [
        checks.Warning(
            f"The jobs are routed to the database {alias!r}, and the project writes to {names}: "
            "a put does not join the transaction it is called in, but commits at once, also "
            "where that transaction is rolled back.",
            hint="Keep the jobs in the database of the writes they belong to, or put them after "
            "the commit: transaction.on_commit(lambda: jobs.put(…), using=…).",
            id="myxo_jobs.W006",
        )
    ]


def check_storages(**kwargs: Any) -> list[CheckMessage]:
    if check_settings():
        return []  # which says what is wrong
    return [
        Error(
            f"The service {service.kind!r} keeps its files in the storage {alias!r}, which is not "
            "among the STORAGES.",
            hint=f"Define STORAGES[{alias!r}], or name another one in the service's `storage` or "
            "in MYXO_JOBS['storage'].",
            id="myxo_jobs.E004",
        )
        for service in services
        if (alias := service.storage_alias) not in storages.backends
    ]


def check_kinds(**kwargs: Any) -> list[CheckMessage]:
    if check_settings():
        return []
    return [
        checks.Warning(
            f"MYXO_JOBS sets something of the kind {kind!r}, but no service of that kind is "
            "registered.",
            hint="Correct the name, or register the service in the `jobs` module of an app.",
            id="myxo_jobs.W008",
        )
        for kind in conf.kind_settings()
        if services.get(kind) is None
    ]


def check_private_storage(**kwargs: Any) -> list[CheckMessage]:
    if check_settings():
        return []
    kinds: dict[str, list[str]] = {}
    for service in services:
        kinds.setdefault(service.storage_alias, []).append(service.kind)
    return [
        checks.Warning(
            f"The storage {alias!r}, in which services keep their files ({', '.join(names)}), has "
            "public addresses: whoever learns one reads the file, whatever `may_see` says.",
            hint=PRIVATE_STORAGE,
            id="myxo_jobs.W009",
        )
        for alias, names in kinds.items()
        if alias in storages.backends and has_public_url(storages[alias])
    ]


# -- looked up in the database ---------------------------------------------------


def check_journal_mode(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    return _of_queue(databases, journal_mode)


def check_table(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    if sys.argv[1:2] == ["migrate"]:
        return []  # which is about to mend it
    return _of_queue(databases, table)


def _of_queue(
    databases: Sequence[str] | None, look: Callable[[str], list[CheckMessage]]
) -> list[CheckMessage]:
    alias = queue.alias()
    if alias not in (databases or ()) or not is_supported(connections[alias]):
        return []
    try:
        return look(alias)
    except (OperationalError, InterfaceError):
        return []  # whoever needs the database will say that it is away


# -- of one storage --------------------------------------------------------------

PRIVATE_STORAGE = """Give the services a storage of their own, outside MEDIA_ROOT:
STORAGES = {
    ...,
    "myxo_jobs": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"location": BASE_DIR / "private"},
    },
}"""


def has_public_url(storage: Storage) -> bool:
    """Tell whether anybody who knows the address of a file in a storage can fetch it."""
    if isinstance(storage, FileSystemStorage):
        # It always has addresses; what counts is whether its folder is one that is served.
        if storage._base_url is not None or storage._location is None:  # type: ignore[attr-defined]
            return True
        media = settings.MEDIA_ROOT
        return bool(media) and Path(storage.location).resolve().is_relative_to(
            Path(media).resolve()
        )
    try:
        url = storage.url("myxo_jobs/check")
    except Exception:  # as of a storage without addresses, or out of reach
        return False
    return "?" not in url  # a signed address ends by itself


# -- of one database -------------------------------------------------------------


def journal_mode(alias: str) -> list[CheckMessage]:
    connection = connections[alias]
    if connection.vendor != "sqlite" or _is_in_memory(connection):
        return []
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        mode = cursor.fetchone()[0]
    if mode == "wal":
        return []
    return [
        checks.Warning(
            f"The SQLite database {alias!r} has the journal mode {mode}: readers and writers "
            "wait for each other, and each commit of a worker for the drive. No job is lost "
            "by it.",
            hint=f'Set DATABASES[{alias!r}]["OPTIONS"]["init_command"] = '
            '"PRAGMA journal_mode=WAL".',
            id="myxo_jobs.W002",
        )
    ]


def memory(alias: str) -> list[CheckMessage]:
    """Warn of an in-memory SQLite database, unless it is the one of a test run."""
    connection = connections[alias]
    name = str(connection.settings_dict["NAME"])
    if connection.vendor != "sqlite" or not _is_in_memory(connection):
        return []
    if name == f"file:memorydb_{alias}?mode=memory&cache=shared":
        return []  # Django's test runner made it
    return [
        checks.Warning(
            f"The SQLite database {alias!r} is in memory: a worker has a memory of its own and "
            "would never see a job.",
            hint=f'Give a file in DATABASES[{alias!r}]["NAME"].',
            id="myxo_jobs.W003",
        )
    ]


def pool_too_small(alias: str, needed: int) -> list[CheckMessage]:
    """Warn when Django's connection pool has fewer connections than a worker needs."""
    connection = connections[alias]
    pool = connection.settings_dict["OPTIONS"].get("pool")
    if connection.vendor != "postgresql" or not pool:
        return []
    sizes = pool if isinstance(pool, dict) else {}
    size = sizes.get("max_size") or sizes.get("min_size", POOL_SIZE)
    if size >= needed:
        return []
    return [
        checks.Warning(
            f"The connection pool of the database {alias!r} has at most {size} connections; a "
            f"worker of all topics needs {needed}, one for each job it runs at once. Jobs would "
            "wait for each other and fail when they wait too long.",
            hint=f'Set DATABASES[{alias!r}]["OPTIONS"]["pool"] = {{"max_size": {needed}}} or '
            "more where the worker runs, or give the topics fewer `workers`.",
            id="myxo_jobs.W004",
        )
    ]


def connections_needed(handlers: Iterable[Handler]) -> int:
    """Return how many of Django's connections a worker of these handlers holds at once.

    One for each thread, and one for all async handlers: Django runs their queries in
    one thread. The worker's own connections are outside a pool.
    """
    handlers = list(handlers)
    threads = sum(handler.workers for handler in handlers if not handler.is_async)
    return threads + any(handler.is_async for handler in handlers)


def table(alias: str) -> list[CheckMessage]:
    connection = connections[alias]
    with connection.cursor() as cursor:
        is_there = Job._meta.db_table in connection.introspection.table_names(cursor)
    loader = MigrationLoader(connection)
    ours = {name for name in loader.graph.nodes if name[0] == APP}
    if is_there and ours <= loader.applied_migrations.keys():
        return []
    what = "is older than this version" if is_there else "does not exist"
    return [
        checks.Warning(
            f"The table of the jobs {what} in the database {alias!r}.",
            hint=f"Run `manage.py migrate --database {alias}`.",
            id="myxo_jobs.W007",
        )
    ]


def _is_in_memory(connection: BaseDatabaseWrapper) -> bool:
    name = str(connection.settings_dict["NAME"])
    return name == ":memory:" or "mode=memory" in name or name.startswith("file::memory:")
