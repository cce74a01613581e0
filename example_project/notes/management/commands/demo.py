"""`manage.py demo`: every text of a folder becomes a note and a job, and a worker is killed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.urls import reverse

from example_project.notes.demo.database import own_database, url_beside
from example_project.notes.demo.files import paths_in
from example_project.notes.demo.run import DemoRun
from example_project.notes.demo.screen import Screen
from myxo_jobs.models import Job


class Command(BaseCommand):
    help = (
        "Make a note of every text of a folder, and a job that counts its words, each pair in "
        "one transaction; kill the worker half-way; check that nothing is lost. It works in a "
        "database of its own beside the site's: demo.sqlite3, or on PostgreSQL NAME_demo."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "folder", nargs="?", type=Path, help="the folder; the installed Django if left out"
        )

    def handle(self, *args: Any, folder: Path | None, **options: Any) -> None:
        if folder is not None and not folder.is_dir():
            raise CommandError(f"there is no folder {folder}")
        paths = paths_in(folder)
        if not paths:
            raise CommandError(f"there are no files in {folder}")
        screen = Screen(self.stdout)
        url = url_beside(settings.DATABASE_URL)
        screen.say(f"{len(paths):,} files of {folder or 'the installed Django'}")
        with own_database(url), tempfile.TemporaryDirectory(prefix="demo-") as own:
            run = DemoRun(paths, url, Path(own), screen)
            try:
                outcome = run()
            except KeyboardInterrupt:
                raise CommandError("interrupted") from None
            if not outcome.puts:
                raise CommandError(f"there are no texts in {folder}")
            screen.say()
            screen.table(list(outcome.rows()))
            if outcome.failed:
                _tell_of_failed(screen, url)
            if faults := outcome.faults():
                screen.say(f"\nThe workers wrote:\n{run.logs()}")
                raise CommandError("not as promised: " + "; ".join(faults))


def _tell_of_failed(screen: Screen, url: str) -> None:
    job_id = Job.objects.filter(failed=True).values_list("pk", flat=True)[0]
    address = f"{reverse('admin:index')}myxo_jobs/job/"
    screen.say(f"""
The failed jobs stay for a person. In SQL:
  select id, topic, attempts, error from myxo_jobs where failed;
  update myxo_jobs set failed = false, attempts = 0 where id = {job_id};  -- run it again, now
In the admin (user admin, password admin):
  DATABASE_URL='{url}' {sys.executable} manage.py runserver
  http://127.0.0.1:8000{address}?status=failed
This database stays until the next demo.""")
