"""The run: a block for each file, and two workers, of which the first is killed half-way."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
from django.core.management import CommandError
from django.db import reset_queries, transaction
from django.db.models import Count

from example_project.notes import ledger
from example_project.notes.demo.files import TextFile, read
from example_project.notes.demo.outcome import Outcome, Put, check
from example_project.notes.demo.screen import Screen
from example_project.notes.demo.workers import Worker
from example_project.notes.jobs import CountWords, jobs
from example_project.notes.models import Note
from myxo_jobs.models import Job

ROLLED_BACK_EVERY = 20
BROKEN_PARTS = 5
LOOK_SECONDS = 0.1
# As long as a lease and much more: after that without any outcome, none will come.
PATIENCE_SECONDS = 30.0


class RolledBackOnPurpose(Exception):  # noqa: N818 - nothing went wrong
    """Leaves an atomic block after the put in it."""


class Standing(msgspec.Struct, frozen=True):
    """How many jobs are in which state at one look."""

    waiting: int
    running: int
    failed: int


def look() -> Standing:
    jobs_in = dict(Job.objects.values_list("status").annotate(Count("pk")))
    return Standing(*(jobs_in.get(status, 0) for status in ("pending", "running", "failed")))


class DemoRun:
    """One run over the files of `paths`; `folder` takes its ledger and logs."""

    def __init__(self, paths: list[Path], url: str, folder: Path, screen: Screen) -> None:
        self._paths = paths
        self._url = url
        self._folder = folder
        self._screen = screen
        self._puts: list[Put] = []
        self._rolled_back = 0
        self._skipped = 0
        self._workers: list[Worker] = []
        self._left_by_killed = 0
        self._settled = 0
        self._settled_at = 0.0
        self._looked_at = 0.0

    def __call__(self) -> Outcome:
        with ExitStack() as self._stack:
            self._start_worker()
            began = self._settled_at = time.monotonic()
            self._put_all()
            self._wait_for_the_last()
            status = self._workers[-1].stop()
        return check(
            self._puts,
            self._rolled_back,
            ledger.runs(self._folder / "ledger"),
            skipped=self._skipped,
            left_by_killed=self._left_by_killed,
            seconds=self._settled_at - began,
            exit_status=status,
        )

    def logs(self) -> str:
        """Return the end of what the workers wrote."""
        return "\n".join(worker.last_words() for worker in self._workers)

    @property
    def _expected(self) -> int:
        """How many jobs there will have been, if all files to come are texts."""
        files = len(self._paths) - self._skipped
        return files - files // ROLLED_BACK_EVERY

    # -- put -----------------------------------------------------------------

    def _put_all(self) -> None:
        step = max(len(self._paths) // BROKEN_PARTS, 3)
        number = 0
        for path in self._paths:
            file = read(path)
            if file is None:
                self._skipped += 1
                continue
            number += 1
            broken = number > step and number % step == 1
            self._put(file, broken=broken, roll_back=number % ROLLED_BACK_EVERY == 0)
            self._go_on()

    def _put(self, file: TextFile, *, broken: bool, roll_back: bool) -> None:
        kind = Note.Kind.BROKEN if broken else Note.Kind.PLAIN
        note = Note(title=file.name, text=file.text, kind=kind)
        try:
            with transaction.atomic():
                note.save()
                job_id = jobs.put(CountWords(note_id=note.pk), key=file.name)
                if roll_back:
                    raise RolledBackOnPurpose
        except RolledBackOnPurpose:
            self._rolled_back += 1
            return
        if job_id is None:
            raise CommandError(f"no job was put for {file.name}: its key was there already")
        self._puts.append(Put(job_id, note.pk, file.name, file.words, broken))

    # -- work ----------------------------------------------------------------

    def _start_worker(self) -> None:
        number = len(self._workers) + 1
        worker = self._stack.enter_context(Worker(self._url, self._folder, number))
        self._workers.append(worker)
        self._screen.say(f"worker {number} started: manage.py runjobs, process {worker.pid}")

    def _wait_for_the_last(self) -> None:
        while self._settled < len(self._puts) or len(self._workers) < 2:
            if time.monotonic() - self._settled_at > PATIENCE_SECONDS:
                self._screen.say(f"no job was settled for {PATIENCE_SECONDS:.0f} s")
                return
            time.sleep(LOOK_SECONDS / 10)
            self._go_on()
        self._show(look(), now=True)

    def _go_on(self) -> None:
        """Look how far the workers are, every now and then, and kill the first half-way."""
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        reset_queries()  # DEBUG keeps each statement, and these hold whole files
        self._looked_at = time.monotonic()
        self._check_worker()
        standing = look()
        settled = len(self._puts) - standing.waiting - standing.running
        if settled != self._settled:
            self._settled, self._settled_at = settled, self._looked_at
        self._show(standing)
        if len(self._workers) == 1 and 2 * self._settled >= self._expected:
            self._kill_and_replace()

    def _check_worker(self) -> None:
        worker = self._workers[-1]
        if not worker.is_running:
            raise CommandError(f"the worker ended by itself; it wrote:\n{worker.last_words()}")

    def _kill_and_replace(self) -> None:
        def is_busy() -> bool:
            self._left_by_killed = look().running
            return self._left_by_killed > 0 or self._settled >= self._expected

        if self._workers[0].kill_while(is_busy):
            self._screen.say(
                f"worker 1 killed (SIGKILL) after {self._settled:,} jobs, "
                f"with {self._left_by_killed:,} in its hands"
            )
            self._start_worker()

    def _show(self, standing: Standing, *, now: bool = False) -> None:
        done = self._settled - standing.failed
        note = (
            f"{len(self._puts):,} put, {done:,} done, {standing.running:,} running, "
            f"{standing.failed:,} failed"
        )
        self._screen.progress(self._settled, self._expected, note, now=now)
