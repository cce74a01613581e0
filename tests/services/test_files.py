"""A job's files: written once, told by the outcome, and gone with their job."""

from __future__ import annotations

import asyncio
import csv
import io
import logging
import os
import signal
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest
from django.conf import global_settings
from django.contrib.auth.models import User
from django.core.files.storage import FileSystemStorage, storages

from myxo_jobs import GiveUp, Jobs, queue
from myxo_jobs.models import Job
from myxo_jobs.services import (
    JobService,
    cancel_job,
    delete_job,
    enqueue,
    get_job,
    register,
    service_stats,
)
from myxo_jobs.services.document import file_of
from myxo_jobs.services.files import AttemptFiles
from myxo_jobs.services.rows import ServiceJob
from myxo_jobs.testing import run_jobs
from myxo_jobs.worker import worker as worker_module
from myxo_jobs.worker.sweeping import Sweeper
from tests.rig import ago, handler_of, make_job, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = Jobs()
tokens = queue.Tokens()
# A uuid7 of the year 2025.
OLD = UUID("01942000-0000-7000-8000-000000000001")

Process = Callable[[JobService, ServiceJob], Any]


def service(process: Process, **attributes: Any) -> None:
    """Register a service of kind `export`."""
    defaults = {"kind": "export", "backoff": 0.05, "process": process}
    register(type("Export", (JobService,), {**defaults, **attributes}))


def write(self: JobService, job: ServiceJob) -> None:
    with job.file("notes.csv", text=True) as f:
        f.write("a,b\r\n")


def old_uid(number: int) -> UUID:
    return UUID(int=OLD.int + number)


# -- writing -------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_only_file_written_is_the_jobs_file(worker, ended, private, is_async):
    seen: list[Any] = []

    def process(self: JobService, job: ServiceJob) -> dict[str, int]:
        with job.file("notes.csv", text=True) as f:
            csv.writer(f).writerow(["é", "a\nb"])
            seen.append(f.name)
        seen.append((f.name, f.size))
        return {"bytes_out": f.size}

    async def process_async(self: JobService, job: ServiceJob) -> dict[str, int]:
        async with job.file("notes.csv", text=True) as f:
            csv.writer(f).writerow(["é", "a\nb"])
            seen.append(f.name)
        seen.append((f.name, f.size))
        return {"bytes_out": f.size}

    service(process_async if is_async else process)
    worker(topics=["export"])
    uid = enqueue("export", {})
    job = ended(uid)
    name = job.result["file"]

    root, kind, folder, token, last = name.split("/")
    assert (root, kind, folder, last) == ("myxo_jobs", "export", uid, "notes.csv")
    assert len(token) >= 22
    assert (private / name).read_bytes() == 'é,"a\nb"\r\n'.encode()
    assert seen == [name, (name, 10)]
    assert job.result == {"bytes_out": 10, "file": name, "storage": "myxo_jobs", "file_bytes": 10}


def test_a_file_is_seekable_and_of_bytes_unless_of_text(worker, ended, private):
    def process(self: JobService, job: ServiceJob) -> None:
        with job.file("notes.zip") as f, zipfile.ZipFile(f, "w") as archive:
            archive.writestr("a.txt", "a")

    service(process)
    worker(topics=["export"])
    job = ended(enqueue("export", {}))

    assert zipfile.ZipFile(private / job.result["file"]).read("a.txt") == b"a"
    assert job.bytes_out == (private / job.result["file"]).stat().st_size


@pytest.mark.parametrize("text", [False, True])
def test_what_closes_the_file_leaves_it_to_its_block(worker, ended, private, text):
    def process(self: JobService, job: ServiceJob) -> None:
        with job.file("notes.txt", text=text) as f:
            if text:
                f.write("é")
                f.close()
            else:
                with io.TextIOWrapper(f, encoding="utf-8") as wrapped:
                    wrapped.write("é")
            f.close()
        f.close()

    service(process)
    worker(topics=["export"])
    job = ended(enqueue("export", {}))

    assert (job.status, job.attempts, job.error) == ("done", 1, "")
    assert (private / job.result["file"]).read_text() == "é"


def test_of_several_files_the_result_names_the_jobs(worker, ended, private):
    def process(self: JobService, job: ServiceJob) -> Any:
        with job.file("a.txt") as a, job.file("b.txt") as b:
            a.write(b"a")
            b.write(b"bb")
        if job.payload == "no":
            return {"file": None}
        return {"file": b.name} if job.payload else None

    service(process)
    worker(topics=["export"])
    job = ended(enqueue("export", True))
    assert job.result["file"].endswith("/b.txt")
    assert job.result["file_bytes"] == 2
    assert ended(enqueue("export", "no")).result == {"file": None}
    unnamed = ended(enqueue("export", False))
    assert (unnamed.status, unnamed.attempts) == ("failed", 1)
    assert "name the job's in result['file']" in unnamed.error


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".", "..", "a\x00", "a\n", "x" * 256, 7, None])
def test_what_is_no_name_of_a_file_is_refused(ended, private, name):
    service(lambda self, job: job.file(name), attempts=1)
    uid = enqueue("export", {})
    run_jobs(raise_errors=False)

    assert ended(uid).error.startswith("ValueError: file takes the plain name")
    assert list(private.iterdir()) == []


def test_of_a_job_that_is_done_only_its_own_file_stays(worker, ended, files):
    def process(self: JobService, job: ServiceJob) -> Any:
        with job.file("working.bin") as working:
            working.write(b"x" * 1_000_000)
        with job.file("good.txt", text=True) as good:
            good.write("good")
        return {"file": good.name if job.payload else None}

    service(process)
    worker(topics=["export"])
    job = ended(enqueue("export", True))

    assert files() == [job.result["file"]]
    assert ended(enqueue("export", False)).status == "done"
    assert files() == [job.result["file"]]


def test_a_name_is_used_once_in_an_attempt(worker, ended, files):
    def process(self: JobService, job: ServiceJob) -> None:
        write(self, job)
        write(self, job)

    service(process, attempts=1)
    worker(topics=["export"])

    assert "has written a file 'notes.csv' already" in ended(enqueue("export", {})).error
    assert files() == []


def test_a_file_of_another_job_cannot_be_named(worker, ended):
    service(lambda self, job: write(self, job) or {"file": job.payload})
    worker(topics=["export"])
    theirs = enqueue("export", None)
    job = ended(theirs)
    assert job.result == {"file": None}
    others = ended(enqueue("export", f"myxo_jobs/export/{theirs}/x/notes.csv"))

    assert (others.status, others.attempts) == ("failed", 1)
    assert others.error.startswith("ResultInvalid: result['file'] takes the name of a file of this")


def test_a_result_that_cannot_be_stored_takes_the_file_with_it(worker, ended, files):
    def process(self: JobService, job: ServiceJob) -> dict[str, object]:
        write(self, job)
        return {"a": object()}

    service(process)
    worker(topics=["export"])
    job = ended(enqueue("export", {}))

    assert (job.status, job.attempts, job.result) == ("failed", 1, None)
    assert "did not work" in job.message
    assert files() == []


def test_a_block_that_raises_stores_nothing(worker, ended, files):
    def process(self: JobService, job: ServiceJob) -> None:
        with job.file("notes.csv", text=job.payload) as f:
            f.write("half" if job.payload else b"half")
            raise GiveUp("no")

    service(process)
    worker(topics=["export"])

    for text in (True, False):
        assert ended(enqueue("export", text)).reason == "refused"
    assert files() == []


def test_each_attempt_has_a_folder_of_its_own_and_a_failed_one_leaves_no_file(worker, ended, files):
    def process(self: JobService, job: ServiceJob) -> None:
        with job.file("large.bin") as f:
            f.write(b"x" * 1_000_000)
        seen.append(f.name)
        if job.attempt < 3:
            raise ValueError

    seen: list[str] = []
    service(process)
    worker(topics=["export"])
    job = ended(enqueue("export", {}))

    assert len(set(seen)) == 3
    assert files() == [job.result["file"]] == [seen[-1]]


def test_a_storage_that_cannot_be_written_is_a_failed_attempt(worker, ended, private):
    if os.geteuid() == 0:
        (private / "myxo_jobs").write_text("a file where the folder should be")
    else:
        private.chmod(0o500)
    service(write, attempts=1)
    worker(topics=["export"])
    job = ended(enqueue("export", {}))

    assert (job.status, job.reason) == ("failed", "error")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("which", ["storage", "temporary"])
def test_a_full_disk_fails_the_job_with_a_reason_and_leaves_nothing_half(
    worker, ended, settings, private, small_disk, which
):
    def process(self: JobService, job: ServiceJob) -> None:
        with job.file("large.bin") as f:
            f.write(b"x" * job.payload)

    if which == "storage":
        alias = {**settings.STORAGES["myxo_jobs"], "OPTIONS": {"location": str(small_disk)}}
        settings.STORAGES = {**settings.STORAGES, "myxo_jobs": alias}
    else:
        settings.FILE_UPLOAD_TEMP_DIR = str(small_disk)
    service(process, attempts=2)
    worker(topics=["export"])
    full = ended(enqueue("export", 5_000_000))

    assert (full.status, full.attempts, full.reason) == ("failed", 2, "error")
    assert "No space left on device" in full.error
    assert "space" not in full.message
    for folder in (small_disk, private):
        assert [p for p in folder.rglob("*") if p.is_file()] == []
    fits = ended(enqueue("export", 1_000_000))
    assert (fits.status, fits.bytes_out) == ("done", 1_000_000)


def test_a_service_can_name_its_storage_and_so_can_the_setting(ended, worker, settings, private):
    service(write, storage="default")
    service(write, kind="other")
    worker(topics=["export", "other"])
    assert ended(enqueue("export", {})).result["storage"] == "default"
    settings.MYXO_JOBS = {"storage": "default"}
    assert ended(enqueue("other", {})).result["storage"] == "default"


@pytest.mark.parametrize("kills", [1, 3], ids=["once", "always"])
def test_a_killed_worker_leaves_no_working_file(runjobs, ledger, tmp_path, files, private, kills):
    settings = {
        "STORAGES": {
            **global_settings.STORAGES,
            "myxo_jobs": {
                "BACKEND": "django.core.files.storage.FileSystemStorage",
                "OPTIONS": {"location": str(private)},
            },
        },
        "FILE_UPLOAD_TEMP_DIR": str(tmp_path),
    }
    worker = runjobs("--topics", "deadly", "--processes", "1", settings=settings)
    uid = enqueue("deadly", {"name": "a", "kills": kills})
    job = wait_until(
        lambda: get_job(uid) if get_job(uid).status in ("done", "failed") else None,
        because="it has ended",
        within=60,
    )
    worker.send(signal.SIGTERM)
    worker.wait()

    assert ledger.count("begin", name="a") == min(kills + 1, 3)
    if kills == 1:
        assert job.status == "done"
        assert files() == [job.result["file"]]
        assert files()[0].endswith("/good.txt")
    else:
        assert (job.status, job.reason) == ("failed", "lost")
        assert ledger.count("cleanup", name=uid) >= 1
        assert files() == []
    assert list(tmp_path.glob("*.bin")) == []


def test_a_run_that_a_drain_did_not_wait_for_leaves_no_working_file(
    runjobs, ledger, tmp_path, files, private
):
    settings = {
        "STORAGES": {
            **global_settings.STORAGES,
            "myxo_jobs": {
                "BACKEND": "django.core.files.storage.FileSystemStorage",
                "OPTIONS": {"location": str(private)},
            },
        },
    }
    worker = runjobs("--topics", "patient", "--grace", "1", settings=settings)
    uid = enqueue("patient", str(tmp_path / "go"))
    wait_until(lambda: ledger.count("begin") == 1 and files(), because="it has begun", within=30)
    worker.send(signal.SIGTERM)
    worker.wait()
    (tmp_path / "go").touch()
    worker = runjobs("--topics", "patient", settings=settings)
    job = wait_until(
        lambda: get_job(uid) if get_job(uid).status == "done" else None,
        because="it runs once more",
        within=60,
    )
    worker.send(signal.SIGTERM)
    worker.wait()

    assert (job.attempts, ledger.count("begin")) == (1, 2)
    assert files() == [job.result["file"]]


class Slow(FileSystemStorage):
    """Is told to save, and does it when the test lets it."""

    begun: ClassVar[threading.Event]
    go_on: ClassVar[threading.Event]

    def _save(self, name: str, content: Any) -> str:
        type(self).begun.set()
        assert type(self).go_on.wait(60)
        return super()._save(name, content)


@pytest.mark.parametrize("end", ["cancelled", "timeout"])
def test_a_file_whose_async_run_ends_while_it_is_stored_does_not_stay(
    worker, ended, settings, private, files, end
):
    settings.STORAGES = {
        **settings.STORAGES,
        "myxo_jobs": {"BACKEND": f"{__name__}.Slow", "OPTIONS": {"location": str(private)}},
    }
    Slow.begun, Slow.go_on, left = threading.Event(), threading.Event(), threading.Event()

    async def process(self: JobService, job: ServiceJob) -> None:
        async with job.file("notes.bin") as f:
            f.write(b"x")

    original = AttemptFiles.store

    def store(self: AttemptFiles, *arguments: Any) -> str:
        try:
            return original(self, *arguments)
        finally:
            left.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttemptFiles, "store", store)
        timeout = 5 if end == "timeout" else None
        service(process, attempts=1, job_timeout_seconds=timeout)
        worker(topics=["export"])
        uid = enqueue("export", {})
        assert Slow.begun.wait(30)
        if end == "cancelled":
            cancel_job(uid)
        assert ended(uid).reason == end
        Slow.go_on.set()
        assert left.wait(30)

    assert files() == []


def test_a_worker_that_comes_too_late_records_neither_result_nor_progress_nor_file(
    worker, ended, files
):
    over = threading.Event()

    def process(self: JobService, job: ServiceJob) -> dict[str, int]:
        with job.file("notes.txt", text=True) as f:
            f.write(f"attempt {job.attempt}")
        if job.attempt == 1:
            # As if it had been stopped until its lease was over, and another had claimed it.
            Job.objects.filter(pk=job.pk).update(worker="", lease_until=None)
            wait_until(lambda: get_job(job.uid).status == "done", because="it is done", within=30)
            job.progress(99, 100, "late")
            with job.file("late.txt", text=True) as f:
                f.write("late")
            over.set()
        return {"item_count": job.attempt}

    service(process, max_concurrent=2)
    one = worker(topics=["export"])
    uid = enqueue("export", {})
    assert over.wait(60)
    one.stop()
    job = ended(uid)

    assert (job.item_count, job.progress_note, job.attempts) == (2, None, 2)
    assert job.result["file"] in files()
    assert [name for name in files() if name.endswith("/notes.txt")] == [job.result["file"]]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_file_whose_run_ends_well_but_too_late_does_not_stay(worker, ended, files, is_async):
    over = threading.Event()

    def process(self: JobService, job: ServiceJob) -> None:
        if job.attempt == 1:
            Job.objects.filter(pk=job.pk).update(worker="", lease_until=None)
            wait_until(lambda: get_job(job.uid).status == "done", because="it is done", within=30)
        with job.file("notes.txt", text=True) as f:
            f.write(f"attempt {job.attempt}")
        if job.attempt == 1:
            over.set()

    async def process_async(self: JobService, job: ServiceJob) -> None:
        rows = Job.objects.filter(pk=job.pk)
        if job.attempt == 1:
            await rows.aupdate(worker="", lease_until=None)
            async with asyncio.timeout(30):
                while not await rows.filter(due=None).aexists():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        async with job.file("notes.txt", text=True) as f:
            f.write(f"attempt {job.attempt}")
        if job.attempt == 1:
            over.set()

    service(process_async if is_async else process, max_concurrent=2)
    worker(topics=["export"])
    uid = enqueue("export", {})
    assert over.wait(60)
    job = ended(uid)

    assert job.attempts == 2
    wait_until(lambda: files() == [job.result["file"]], because="the late file is gone", within=30)


class Paused(FileSystemStorage):
    """One whose first list takes as long as a test likes."""

    pause: ClassVar[list[Callable[[str], object]]] = []

    def listdir(self, path: str) -> tuple[list[str], list[str]]:
        if self.pause:
            self.pause.pop()(path)
        return super().listdir(path)


@pytest.fixture
def paused(settings, private) -> Iterator[list[Callable[[str], object]]]:
    options = {"BACKEND": f"{__name__}.Paused", "OPTIONS": {"location": str(private)}}
    settings.STORAGES = {**settings.STORAGES, "myxo_jobs": options}
    yield Paused.pause
    Paused.pause.clear()


def let_another_run_win(job: Job) -> None:
    """Do as a process that is stopped until its claim is over, and another run is done."""
    Job.objects.filter(pk=job.pk).update(worker="", lease_until=None)
    wait_until(lambda: get_job(job.uid).status == "done", because="it is done", within=30)


def test_a_run_that_comes_to_itself_too_late_removes_no_file_of_the_one_that_won(
    worker, ended, files, paused
):
    late = threading.Event()
    service(write, max_concurrent=2)
    uid = enqueue("export", {})

    def pause(path: str) -> None:
        let_another_run_win(get_job(uid))
        late.set()

    paused.append(pause)
    worker(topics=["export"])
    assert late.wait(60)
    job = ended(uid)

    wait_until(lambda: files() == [job.result["file"]], because="nothing else stays", within=30)


def test_a_cleanup_that_comes_too_late_removes_no_file_of_the_run_that_won(worker, ended, files):
    over = threading.Event()

    def process(self: JobService, job: ServiceJob) -> None:
        write(self, job)
        if job.attempt == 1:
            raise GiveUp("no")

    def cleanup(self: JobService, job: ServiceJob) -> None:
        let_another_run_win(job)
        over.set()

    service(process, cleanup=cleanup, max_concurrent=2)
    one = worker(topics=["export"])
    uid = enqueue("export", {})
    assert over.wait(60)
    one.stop()

    assert files() == [ended(uid).result["file"]]


def test_a_sweep_removes_nothing_of_a_job_that_is_retried_meanwhile(private, paused):
    service(write)
    row = make_job("export", status="failed", uid=old_uid(1), expires_at=ago(-60))
    path = private / f"myxo_jobs/export/{row.uid}/token/notes.csv"
    path.parent.parent.mkdir(parents=True)

    def retry(folder: str) -> None:
        if str(row.uid) not in folder:
            paused.append(retry)
            return
        jobs.retry(row.pk)
        path.parent.mkdir()
        path.write_text("x")

    paused.append(retry)
    sweeper().sweep()

    assert not paused
    assert path.exists()


def test_a_file_whose_outcome_was_stored_though_its_answer_was_lost_stays(private, files):
    service(write)
    _, path = done_with_file(private, -60)
    handler_of("export").undo("default", Job.objects.get().result)
    assert path.exists()

    Job.objects.update(result='{"file":"another"}')
    result = f'{{"file":"{path.relative_to(private)}","storage":"myxo_jobs","file_bytes":1}}'
    handler_of("export").undo("default", result)
    handler_of("export").undo("default", "null")
    assert files() == []


class Unlisted(FileSystemStorage):
    """As one elsewhere that cannot list."""

    def listdir(self, path: str) -> tuple[list[str], list[str]]:
        raise NotImplementedError

    def path(self, name: str) -> str:
        if name == "":
            raise NotImplementedError
        return super().path(name)


def test_a_storage_that_cannot_list_loses_the_files_that_are_known(
    worker, ended, settings, private
):
    settings.STORAGES = {
        **settings.STORAGES,
        "myxo_jobs": {
            "BACKEND": f"{__name__}.Unlisted",
            "OPTIONS": {"location": str(private)},
        },
    }

    def process(self: JobService, job: ServiceJob) -> None:
        write(self, job)
        if job.payload == "fail":
            raise GiveUp

    service(process)
    worker(topics=["export"])
    done = ended(enqueue("export", {}))
    assert (private / done.result["file"]).exists()
    ended(enqueue("export", "fail"))
    assert list(private.rglob("*.csv")) == [private / done.result["file"]]
    assert delete_job(done.uid)
    sweeper().sweep()
    assert list(private.rglob("*.csv")) == []


# -- removing ------------------------------------------------------------------------


def sweeper(*, tidies: bool = True) -> Sweeper:
    return Sweeper("default", [handler_of("export")], tokens.next, tidies=tidies)


def done_with_file(private: Path, seconds_ago: float = 5, **columns: Any) -> tuple[Job, Path]:
    uid = columns.pop("uid", None) or queue.uuid7()
    name = f"myxo_jobs/export/{uid}/token/notes.csv"
    path = private / name
    path.parent.mkdir(parents=True)
    path.write_text("x")
    result = f'{{"file":"{name}","storage":"myxo_jobs","file_bytes":1}}'
    values = {"status": "done", "expires_at": ago(seconds_ago), "result": result, "uid": uid}
    return make_job("export", **values | columns), path


def test_one_sweep_removes_the_expired_with_their_files_and_nothing_else(private):
    cleaned: list[str] = []
    service(write, cleanup=lambda self, job: cleaned.append(str(job.uid)))
    expired = [done_with_file(private) for _ in range(100)]
    running = [
        make_job("export", status="running", uid=queue.uuid7(), expires_at=ago(3600))
        for _ in range(50)
    ]
    fresh, fresh_file = done_with_file(private, -60)
    project_file = private / "export/notes.csv"
    project_file.parent.mkdir()
    project_file.write_text("the project's own")
    sweeper().sweep()

    left = set(Job.objects.values_list("pk", flat=True))
    assert left == {row.pk for row in [*running, fresh]}
    assert sorted(cleaned) == sorted(str(row.uid) for row, _ in expired)
    there = sorted(p for p in private.rglob("*") if p.is_file())
    assert there == sorted([fresh_file, project_file])
    assert [p.name for p in (private / "myxo_jobs/export").iterdir()] == [str(fresh.uid)]

    sweeper().sweep()
    assert set(Job.objects.values_list("pk", flat=True)) == left
    assert sorted(p for p in private.rglob("*") if p.is_file()) == there
    assert len(cleaned) == 100


class Stubborn(FileSystemStorage):
    """Deletes nothing in a folder that is marked."""

    def delete(self, name: str) -> None:
        if Path(self.path(name)).with_name("stuck").exists():
            raise PermissionError(name)
        super().delete(name)


def test_a_file_that_cannot_be_removed_is_logged_tried_again_and_holds_up_no_other(
    private, settings, caplog
):
    settings.STORAGES = {
        **settings.STORAGES,
        "myxo_jobs": {
            "BACKEND": f"{__name__}.Stubborn",
            "OPTIONS": {"location": str(private)},
        },
    }
    service(write)
    stuck, path = done_with_file(private, 60)
    path.with_name("stuck").touch()
    other, other_path = done_with_file(private)
    with caplog.at_level(logging.ERROR, logger="myxo_jobs"):
        sweeper().sweep()

    assert [row.pk for row in Job.objects.all()] == [stuck.pk]
    assert other
    assert not other_path.exists()
    assert [record.job for record in caplog.records] == [stuck.pk]
    path.with_name("stuck").unlink()
    Job.objects.update(lease_until=ago(1))
    sweeper().sweep()
    assert not Job.objects.exists()
    assert not path.exists()


def test_a_service_whose_cleanup_fails_keeps_its_files_until_it_comes_through(private):
    def cleanup(self: JobService, job: ServiceJob) -> None:
        if not mended:
            raise OSError

    mended: list[bool] = []
    service(write, cleanup=cleanup)
    row, path = done_with_file(private)
    sweeper().sweep()
    assert path.exists()
    mended.append(True)
    Job.objects.update(lease_until=ago(1))
    sweeper().sweep()

    assert row
    assert not path.exists()
    assert not Job.objects.exists()


def test_folders_of_ours_that_no_row_names_are_removed_after_a_day(private):
    service(write)
    root = private / "myxo_jobs/export"
    kept = [
        root / str(queue.uuid7()) / "token/a.txt",  # its row may be in an open transaction
        root / "notes/a.txt",
        root / str(old_uid(1)).upper() / "a.txt",
        root / "00000000-0000-4000-8000-000000000001/a.txt",
        private / f"myxo_jobs/other/{old_uid(2)}/a.txt",
        private / f"export/{old_uid(3)}/a.txt",
    ]
    kept[2] = root / "01942000-0000-7000-8000-00000000000A/a.txt"
    gone = [root / str(old_uid(4)) / "token/a.txt", root / str(old_uid(5)) / "b.txt"]
    for path in [*kept, *gone]:
        path.parent.mkdir(parents=True)
        path.write_text("x")
    with_row = [done_with_file(private, -60, uid=old_uid(6))[1]]
    waits = root / str(old_uid(7)) / "token/a.txt"
    waits.parent.mkdir(parents=True)
    waits.write_text("x")
    make_job("export", uid=old_uid(7))

    sweeper(tidies=False).sweep()
    assert all(path.exists() for path in gone)
    sweeper().sweep()

    assert [path for path in gone if path.parent.exists()] == []
    assert [path for path in [*kept, *with_row, waits] if not path.exists()] == []


def test_what_a_lost_attempt_left_beside_the_jobs_file_is_removed(private):
    service(write)
    row, path = done_with_file(private, -60, uid=old_uid(1), attempts=2)
    late = path.parent.parent / "another_token/notes.csv"
    late.parent.mkdir()
    late.write_text("from a worker that came too late")
    sweeper().sweep()

    assert row
    assert path.exists()
    assert not late.parent.exists()


def test_what_a_run_left_that_was_given_back_is_removed(private):
    service(write)
    row, path = done_with_file(private, -60, uid=old_uid(1), attempts=1)
    beside = path.with_name("working.bin")
    given_back = path.parent.parent / "another_token/working.bin"
    given_back.parent.mkdir()
    for left in (beside, given_back):
        left.write_text("x")
    one = sweeper()
    one.sweep()

    assert row
    assert path.exists()
    assert not beside.exists()
    assert not given_back.parent.exists()


def test_a_worker_tidies_and_the_one_of_a_test_does_not(private):
    from myxo_jobs import testing

    service(write)
    stray = private / f"myxo_jobs/export/{old_uid(1)}/token/a.txt"
    stray.parent.mkdir(parents=True)
    stray.touch()
    row = done_with_file(private)[0]
    with testing.Worker(topics=["export"]):
        wait_until(
            lambda: not Job.objects.filter(pk=row.pk).exists(), because="it has expired", within=30
        )
    assert stray.exists()
    with worker_module.Worker(topics=["export"]):
        wait_until(lambda: not stray.exists(), because="no row names it", within=30)


def test_a_deleted_job_takes_its_files_along(private, files):
    cleaned: list[str] = []
    service(write, cleanup=lambda self, job: cleaned.append(job.status))
    row, path = done_with_file(private, -60)

    assert delete_job(row.uid)
    assert not path.exists()
    assert cleaned == ["done"]
    assert get_job(row.uid) is None
    assert delete_job(row.uid)


def test_a_discarded_job_takes_its_files_along(private):
    service(write)
    row, path = done_with_file(private, -60)

    assert jobs.discard(row.pk)
    assert not path.exists()


@pytest.mark.parametrize(
    "told", [{"storage": "big disk"}, {"storage": ["a"]}, {"file": None, "storage": "x"}], ids=repr
)
def test_a_result_that_tells_of_a_storage_of_its_own_goes_with_its_job(ended, told):
    service(lambda self, job: {**told, "file_bytes": 3, "item_count": 2})
    uid = enqueue("export", {})
    run_jobs()

    assert (ended(uid).item_count, ended(uid).bytes_out) == (2, None)
    assert service_stats("export")["space_held"] == 0
    assert delete_job(uid)
    assert get_job(uid) is None


def test_a_renamed_kind_keeps_the_files_of_its_jobs_and_removes_them_with_their_rows(files):
    service(write)
    service(write, kind="report")
    uid = enqueue("export", {})
    run_jobs()
    name = get_job(uid).result["file"]
    Job.objects.filter(topic="export").update(topic="report")

    assert file_of(get_job(uid)).stored_name == name
    assert delete_job(uid)
    assert files() == []


def test_run_jobs_keeps_what_a_service_has_written():
    def process(self: JobService, job: ServiceJob) -> None:
        User.objects.create_user("made by the service")

    service(process)
    uid = enqueue("export", {})
    run_jobs()

    assert get_job(uid).status == "done"
    assert User.objects.filter(username="made by the service").exists()


def test_run_jobs_writes_files_too(private, files):
    service(write)
    uid = enqueue("export", {})
    run_jobs()

    assert files() == [get_job(uid).result["file"]]
    assert storages["myxo_jobs"].exists(files()[0])
