"""What a worker does for a service: run its jobs, explain failures, tell of ends, clean up."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from asgiref.sync import sync_to_async
from django.core.files.storage import storages

from myxo_jobs.errors import GiveUp, ResultInvalid
from myxo_jobs.handlers import Handler, Run
from myxo_jobs.payloads import Codec, storable
from myxo_jobs.services.dials import dials
from myxo_jobs.services.files import (
    STORED_NAME,
    AttemptFiles,
    Strays,
    remove_files_of,
    remove_folder,
    try_to_remove,
)
from myxo_jobs.services.service import FILE_NAMES, FINISHED, FINISHED_ATTEMPTS, JobService

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from myxo_jobs.databases import Row
    from myxo_jobs.models import Job
    from myxo_jobs.services.rows import ServiceJob

# The models are imported by what runs: a project registers its services at any time.

logger = logging.getLogger("myxo_jobs")

T = TypeVar("T")

MESSAGE_CHARACTERS = 2_000
COUNTS = ("item_count", "bytes_in", "bytes_out")
LARGEST_COUNT = 2**53  # what JavaScript and a double have exactly


class Finished(msgspec.Struct, frozen=True):
    """The request of `<kind>.finished`: which job has ended."""

    uid: str


def handlers_of(service: JobService, codec: Codec) -> list[Handler]:
    """Return the handlers of a service: of its jobs and, if it tells of their end, of that."""
    main = Handler(
        function=_named(_process_of(service), service, "process"),
        request=service.payload_type or msgspec.Struct,
        codec=codec,
        topic=service.kind,
        workers=max(service.max_concurrent, 1),
        attempts=service.attempts,
        lease=float(service.lease),
        backoff=float(service.backoff),
        timeout=_seconds(service.job_timeout_seconds),
        atomic=False,
        priority=service.priority,
        takes_run=True,
        is_async=inspect.iscoroutinefunction(service.process),
        keep=float(service.retention_seconds),
        limit=service.max_concurrent,
        cleanup=lambda row: clean_up(service, row),
        failed_gives_up_key=True,
        failed_expires=True,
        at_outcome=(lambda connection, job_id: tell_of_end(service, connection, job_id))
        if service.tells
        else None,
        explain=lambda row, error: explain(service, row, error),
        dials=dials,
        by_name=True,
        cancellable=service.cancellable,
        brings=service.kind + FINISHED if service.tells else "",
        tidy=_tidy_of(service),
        undo=remove_late,
    )
    if not service.tells:
        return [main]
    return [
        main,
        Handler(
            function=_named(_finished_of(service), service, "finished"),
            request=Finished,
            codec=Codec(Finished),
            topic=service.kind + FINISHED,
            workers=1,
            attempts=FINISHED_ATTEMPTS,
            lease=float(service.lease),
            backoff=float(service.backoff),
            timeout=None,
            atomic=False,
            priority=0,
            takes_run=True,
            is_async=inspect.iscoroutinefunction(service.finished),
            by_name=True,
        ),
    ]


def _named(function: Callable[..., Any], service: JobService, method: str) -> Callable[..., Any]:
    function.__module__ = type(service).__module__
    function.__qualname__ = f"{type(service).__qualname__}.{method}"
    return function


def _seconds(value: float | None) -> float | None:
    return None if value is None else float(value)


# -- process -------------------------------------------------------------------------


def _process_of(service: JobService) -> Callable[..., Any]:
    def process(payload: Any, run: Run) -> Any:
        from myxo_jobs.services.rows import ServiceJob, speaking

        rows = ServiceJob.objects.using(run._alias)
        row = rows.defer("payload").get(pk=run.id, uid=run.uid)
        job, files = _running(service, row, payload, run)
        older = files.older(is_first=run.attempt == 1)
        if older and rows.filter(pk=run.id, worker=run._token).exists():
            files.remove_older(older)
        try:
            with speaking(job), _spoken_reasons():
                result = checked_result(files, service.process(job))
            files.end(kept_file(result))
        except BaseException:  # whatever ends the attempt, its files go with it
            files.end()
            raise
        return result

    async def process_async(payload: Any, run: Run) -> Any:
        from myxo_jobs.services.rows import ServiceJob, speaking

        rows = ServiceJob.objects.using(run._alias)
        row = await rows.defer("payload").aget(pk=run.id, uid=run.uid)
        job, files = _running(service, row, payload, run)
        older = await _apart(files.older, is_first=run.attempt == 1)
        if older and await rows.filter(pk=run.id, worker=run._token).aexists():
            await _apart(files.remove_older, older)
        try:
            with speaking(job), _spoken_reasons():
                result = checked_result(files, await service.process(job))
            await _apart(files.end, kept_file(result))
        except BaseException:
            await _apart(files.end)
            raise
        return result

    return process_async if inspect.iscoroutinefunction(service.process) else process


async def _apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call what may take long in a thread of its own."""
    return await sync_to_async(function, thread_sensitive=False)(*arguments, **named)


def _running(
    service: JobService, job: ServiceJob, payload: Any, run: Run
) -> tuple[ServiceJob, AttemptFiles]:
    files = AttemptFiles(service.kind, job.uid, service.storage_alias)
    job.payload, job._run, job._files = payload, run, files
    return job, files


@contextmanager
def _spoken_reasons() -> Iterator[None]:
    """Turn a lazy translation that is given up with into text, in the owner's language."""
    try:
        yield
    except GiveUp as given_up:
        given_up.reason = str(given_up.reason)
        raise


def checked_result(files: AttemptFiles, result: Any) -> Any:
    """Return what is stored as the result: with the file of this attempt, if there is one.

    Raises ResultInvalid for a file that this attempt did not write, and for counts that are
    no counts.
    """
    sizes = files.sizes
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("process returned a coroutine, which nobody awaits: make it `async def`")
    if isinstance(result, msgspec.Struct):
        result = msgspec.to_builtins(result)
    if result is None and sizes:
        result = {}
    if not isinstance(result, dict):
        if sizes:
            raise ResultInvalid(
                f"process wrote a file and returned a {type(result).__name__}: return a dict"
            )
        return result
    _check_counts(result)
    if "file" not in result and sizes:
        result = {**result, "file": _only(list(sizes))}
    name = result.get("file")
    if name is None:
        return result
    if not isinstance(name, str) or name not in sizes:
        raise ResultInvalid(
            f"result['file'] takes the name of a file of this attempt, not {name!r}"
        )
    told = dict(zip(FILE_NAMES, (name, files.storage, sizes[name]), strict=True))
    # Last, where `service_stats` finds it.
    return {**{key: value for key, value in result.items() if key not in told}, **told}


def kept_file(result: Any) -> str | None:
    """Return the stored name of the job's file, None if there is none."""
    return result.get("file") if isinstance(result, dict) else None


def _only(names: list[str]) -> str:
    if len(names) > 1:
        raise ResultInvalid(f"process wrote {len(names)} files: name the job's in result['file']")
    return names[0]


def _check_counts(result: dict[Any, Any]) -> None:
    for name in COUNTS:
        value = result.get(name)
        fits = (
            isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT
        )
        if value is not None and not fits:
            raise ResultInvalid(f"result[{name!r}] takes a whole number from 0, not {value!r}")


def remove_late(alias: str, result: str) -> None:
    """Remove the file of a run whose outcome came too late, unless it was stored all the same."""
    told = msgspec.json.decode(result)
    name = kept_file(told)
    stored = STORED_NAME.fullmatch(name) if name is not None else None
    if stored is None or _is_of_a_row(alias, stored["uid"], stored[0]):
        return
    folder = stored[0].rpartition("/")[0]
    try_to_remove(folder, lambda: remove_folder(storages[told["storage"]], folder, [stored[0]]))


def _is_of_a_row(alias: str, uid: str, name: str) -> bool:
    """Tell whether a job has a file: the answer to its outcome may have been lost."""
    from myxo_jobs.services.rows import ServiceJob

    rows = ServiceJob.objects.using(alias).filter(uid=uid, failed=False, due__isnull=True)
    return any(kept_file(row.result) == name for row in rows.only("result"))


# -- the end -------------------------------------------------------------------------


def tell_of_end(service: JobService, connection: BaseDatabaseWrapper, job_id: int) -> Row | None:
    """Return the job `<kind>.finished` of a job that has ended, to be put with its outcome."""
    from myxo_jobs.databases import Row

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT uid FROM myxo_jobs WHERE id = %s AND (failed OR due IS NULL)", [job_id]
        )
        found = cursor.fetchone()
    if found is None:
        return None  # it was put again, and waits
    from uuid import UUID

    uid = found[0] if isinstance(found[0], UUID) else UUID(str(found[0]))
    payload = msgspec.json.encode(Finished(str(uid))).decode()
    return Row(service.kind + FINISHED, payload, None, 0)


def _finished_of(service: JobService) -> Callable[..., Any]:
    def finished(request: Finished, run: Run) -> None:
        from myxo_jobs.services.rows import ServiceJob, speaking

        job = ServiceJob.objects.using(run._alias).filter(uid=request.uid).first()
        if job is not None and _has_ended(job):
            with speaking(job):
                service.finished(job)

    async def finished_async(request: Finished, run: Run) -> None:
        from myxo_jobs.services.rows import ServiceJob, speaking

        job = await ServiceJob.objects.using(run._alias).filter(uid=request.uid).afirst()
        if job is not None and _has_ended(job):
            with speaking(job):
                await service.finished(job)

    return finished_async if inspect.iscoroutinefunction(service.finished) else finished


def _has_ended(job: ServiceJob) -> bool:
    """Tell whether there is an end to tell of: a person may have retried the job since."""
    return job.status in ("done", "failed")


def explain(service: JobService, row: Job, error: BaseException) -> str:
    """Return the sentence for the owner of a job that has failed. Never raises for the service."""
    from myxo_jobs import queue
    from myxo_jobs.services.rows import as_service_job, speaking

    job = as_service_job(row)
    with speaking(job):
        usual = storable(JobService.explain(service, job, error), characters=MESSAGE_CHARACTERS)
        try:
            with queue.apart(job):
                message = service.explain(job, error) or usual
                return storable(message, characters=MESSAGE_CHARACTERS)
        except BaseException:  # as around `process`: whatever it raises, the job has failed
            logger.exception(
                "job=%s topic=%s attempt=%s explain failed", job.pk, job.topic, job.attempts
            )
            return usual


def clean_up(service: JobService, row: Job) -> None:
    """Clean up after a job: what the service left elsewhere first, then the files."""
    from myxo_jobs.services.rows import as_service_job

    job = as_service_job(row)
    try:
        service.cleanup(job)
    except BaseException:
        if job.status != "done":  # else its row stays, and its files with it, for another try
            _remove_files(service, job)
        raise
    _remove_files(service, job)


def _remove_files(service: JobService, job: ServiceJob) -> None:
    from myxo_jobs.models import Job

    def is_as_it_was() -> bool:
        # What cleans up may be late: another run may have the job now, and write its file.
        rows = Job.objects.using(job._state.db).filter(pk=job.pk)
        now = rows.values_list("worker", "failed", "started_at").first()
        return now is None or now == (job.worker, job.failed, job.started_at)

    remove_files_of(service.kind, job.uid, job.result, service.storage_alias, is_as_it_was)


def _tidy_of(service: JobService) -> Callable[[], None]:
    strays = None

    def tidy() -> None:
        nonlocal strays
        strays = strays or Strays(service.kind, service.storage_alias)
        strays.sweep()

    return tidy
