"""`JobService`, what a project writes, and the services that it has registered.

Imports no model, so that a project may declare its services wherever it likes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
from django.conf import settings as django_settings
from django.utils.functional import Promise
from django.utils.translation import gettext as _

from myxo_jobs.conf import settings
from myxo_jobs.errors import Cancelled, HandlerConflict, KindUnknown, ServiceInvalid
from myxo_jobs.handlers import LONGEST_KEEP_SECONDS, OPTIONS, Handler, registry
from myxo_jobs.payloads import Codec, JsonCodec

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

    from myxo_jobs.services.rows import ServiceJob

S = TypeVar("S", bound="type[JobService]")

OWN_STORAGE = "myxo_jobs"
KIND = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
KIND_CHARACTERS = 200
FINISHED = ".finished"
FINISHED_ATTEMPTS = 5
# How much of the uid an owner quotes: its last group.
QUOTED_CHARACTERS = 12


class JobService:
    """Work that a person starts and waits for. Subclass it, give `kind` and `process`."""

    # The stable name of the service, stored with each job as its topic.
    kind: ClassVar[str] = ""
    # What people call it; the kind where it is empty.
    title: ClassVar[str | Promise] = ""
    # How long an ended job stays for its owner.
    retention_seconds: ClassVar[float] = 7 * 24 * 3600
    # How many of its jobs run at once in the whole deployment; 0 pauses the kind.
    max_concurrent: ClassVar[int] = 1
    # How long one run may take; None: as long as it likes.
    job_timeout_seconds: ClassVar[float | None] = 3600
    # How many runs a job gets before it has failed.
    attempts: ClassVar[int] = 3
    # The Struct that payloads are; None: whatever JSON has.
    payload_type: ClassVar[type[msgspec.Struct] | None] = None
    # The alias of STORAGES that its files are kept in; empty: the project's default.
    storage: ClassVar[str] = ""
    # Whether a job can be asked to stop.
    cancellable: ClassVar[bool] = True
    # As in `@job`.
    lease: ClassVar[float] = 30.0
    backoff: ClassVar[float] = 1.0
    priority: ClassVar[int] = 0

    def process(self, job: ServiceJob) -> Any:
        """Do the work; return its result, or None. May be async.

        `job.payload` says what to do; `job.progress`, `job.track` and `job.file` are there
        for it.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no process(job)")

    def finished(self, job: ServiceJob) -> Any:
        """Tell the person that the job has ended, done or failed. May be async.

        Runs as a job of its own, once the outcome stands.
        """

    def cleanup(self, job: ServiceJob) -> None:
        """Remove what the job has left elsewhere than in its files. Harmless to repeat."""

    def explain(self, job: ServiceJob, error: BaseException) -> str:
        """Return the sentence that tells the owner why their job has failed."""
        if isinstance(error, Cancelled):
            return _("It was cancelled.")
        words = _("It did not work. If you ask about it, please quote %(end)s.")
        return words % {"end": str(job.uid)[-QUOTED_CHARACTERS:]}

    def public_result(self, job: ServiceJob) -> Any:
        """Return what of the result the owner may see."""
        result = job.result
        if not isinstance(result, dict):
            return result
        return {name: value for name, value in result.items() if name not in FILE_NAMES}

    def may_see(self, request: HttpRequest, job: ServiceJob) -> bool:
        """Tell whether whoever asks may see the job and fetch its file.

        The signed-in user who owns it, or staff with the permission to view jobs.
        """
        user = getattr(request, "user", None)
        if user is None or not (user.is_authenticated and user.is_active):
            return False
        if job.owner_kind and (job.owner_kind, job.owner_id) == owner_of(user):
            return True
        return bool(user.is_staff and user.has_perm("myxo_jobs.view_job"))

    def respond(self, request: HttpRequest, job: ServiceJob) -> HttpResponse | None:
        """Let others send the file; None: this site sends it itself."""
        return None

    # -- what is made of it ------------------------------------------------------

    @property
    def storage_alias(self) -> str:
        """The alias of STORAGES that its files are kept in."""
        chosen = self.storage or settings().storage
        return chosen or (OWN_STORAGE if OWN_STORAGE in django_settings.STORAGES else "default")

    @property
    def shown_title(self) -> str:
        return str(self.title or self.kind)

    @property
    def tells(self) -> bool:
        """Whether it has something to do when a job has ended."""
        return type(self).finished is not JobService.finished


# What a result tells of the job's file: its name in the storage, the alias, its size.
FILE_NAMES = ("file", "storage", "file_bytes")


class Services:
    """Every service of this process, by kind."""

    def __init__(self) -> None:
        self._by_kind: dict[str, JobService] = {}

    def add(self, service: JobService) -> None:
        first = self._by_kind.get(service.kind)
        if first is not None:
            raise HandlerConflict(
                f"kind {service.kind!r}", where(type(first)), where(type(service))
            )
        self._by_kind[service.kind] = service

    def get(self, kind: str) -> JobService | None:
        return self._by_kind.get(kind)

    def __iter__(self) -> Iterator[JobService]:
        return iter(list(self._by_kind.values()))


services = Services()


def register(service_class: S) -> S:
    """Declare a service; its class stays as it is.

    To declare it once more changes nothing. Raises ServiceInvalid, naming the attribute, when
    one cannot be used, and HandlerConflict when its kind is taken by another.
    """
    check(service_class)
    if type(services.get(service_class.kind)) is service_class:
        return service_class
    from myxo_jobs.services import running  # which imports the models late, too

    service = service_class()
    handlers = running.handlers_of(service, codec_of(service))
    services.add(service)
    for handler in handlers:
        registry.add(handler)
    return service_class


def service_of(kind: str) -> JobService:
    """Return the service of a kind. Raises KindUnknown when there is none."""
    service = services.get(kind) if isinstance(kind, str) else None
    if service is None:
        raise KindUnknown(kind, sorted(one.kind for one in services))
    return service


def codec_of(service: JobService) -> Codec:
    try:
        if service.payload_type is None:
            return JsonCodec(service.kind)
        return Codec(service.payload_type)
    except (TypeError, NameError) as error:
        raise ServiceInvalid(where(type(service)), f"payload_type: {error}") from error


def owner_of(owner: Any) -> tuple[str, str]:
    """Return the kind and the id of an owner. Raises ValueError for one without a row."""
    meta = getattr(owner, "_meta", None)
    if meta is None or owner.pk is None or owner._state.adding:
        raise ValueError(f"owner takes a user or another saved model instance, not {owner!r}")
    return meta.label_lower, str(owner.pk)


# -- checks of a declaration --------------------------------------------------------


def where(service_class: type) -> str:
    return f"{service_class.__module__}.{service_class.__qualname__}"


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most


# What each attribute takes: a test, and the words for it.
ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kind": (
        lambda value: (
            isinstance(value, str)
            and bool(KIND.fullmatch(value))
            and len(value) <= KIND_CHARACTERS
            and not value.endswith(FINISHED)
        ),
        f"letters, digits, '_', '-' and '.', at most {KIND_CHARACTERS}, not ending in {FINISHED!r}",
    ),
    "title": (lambda value: isinstance(value, (str, Promise)), "text"),
    "retention_seconds": (
        lambda value: _is_number(value, LONGEST_KEEP_SECONDS),
        "seconds from 0, up to a hundred years",
    ),
    "max_concurrent": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
        "a whole number from 0",
    ),
    "job_timeout_seconds": OPTIONS["timeout"],
    "attempts": OPTIONS["attempts"],
    "payload_type": (
        lambda value: (
            value is None
            or (
                isinstance(value, type)
                and issubclass(value, msgspec.Struct)
                and value.__struct_config__.eq
            )
        ),
        "a msgspec.Struct class that compares, or None",
    ),
    "storage": (lambda value: isinstance(value, str), "an alias of STORAGES"),
    "cancellable": (lambda value: isinstance(value, bool), "True or False"),
    "lease": OPTIONS["lease"],
    "backoff": OPTIONS["backoff"],
    "priority": OPTIONS["priority"],
}


def check(service_class: Any) -> None:
    """Raise ServiceInvalid for a class that cannot be a service, naming what is wrong."""
    if not (isinstance(service_class, type) and issubclass(service_class, JobService)):
        raise ServiceInvalid(repr(service_class), "register takes a subclass of JobService")
    place = where(service_class)
    for name, (fits, wanted) in ATTRIBUTES.items():
        value = getattr(service_class, name)
        if not fits(value):
            raise ServiceInvalid(place, f"{name} takes {wanted}, not {value!r}")
    if service_class.process is JobService.process:
        raise ServiceInvalid(place, "it has no process(job)")
    for name in ("process", "finished"):
        function = getattr(service_class, name)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ServiceInvalid(place, f"{name} is a plain or async function, not a generator")
    for name in ("cleanup", "explain", "public_result", "may_see", "respond"):
        if inspect.iscoroutinefunction(getattr(service_class, name)):
            raise ServiceInvalid(place, f"{name} is a plain function, not an async one")


def handler_of(service: JobService) -> Handler:
    """Return the handler that runs the jobs of a service."""
    handler = registry.of_topic(service.kind)
    if handler is None:
        raise LookupError(f"the services are not ready yet: {service.kind!r} is asked for too soon")
    return handler
