"""The wheel, in an environment with nothing else, beside a fresh project, as the README says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from tests.docs.pages import README, blocks_of
from tests.rig import ROOT

MODELS = """
from django.db import models

class Note(models.Model):
    text = models.TextField()
    words = models.IntegerField(null=True)
"""
PUT = """
from notes.jobs import save_and_count
from notes.models import Note
save_and_count(Note(text="four words and these"))
print("put", Note.objects.get().words)
"""
SEE = """
from notes.models import Note
print("words", Note.objects.get().words)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without anything of this suite in its environment; return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
    kept.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def handlers_of_the_readme() -> str:
    (block,) = [block for block in blocks_of(README) if block.file == "notes/jobs.py"]
    return block.text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing built earlier gets into it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "myxo_jobs", source / "myxo_jobs", ignore=shutil.ignore_patterns("__pycache__")
    )
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", target, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path):
    package = ROOT / "myxo_jobs"
    ours = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert held == ours
    assert "myxo_jobs/py.typed" in held


def test_the_wheel_works_beside_a_fresh_project_as_the_readme_says(
    wheel: Path, tmp_path: Path, empty_database: dict[str, Any]
):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    # On SQLite the extra stays out, as the README says: psycopg then has no library.
    extra = "" if settings.DATABASE == "sqlite" else "[postgres]"
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}{extra}", cwd=tmp_path)

    run(environment / "bin" / "django-admin", "startproject", "mysite", cwd=tmp_path)
    site = tmp_path / "mysite"

    def manage(*command: str) -> str:
        return run(python, "-W", "error", "manage.py", *command, cwd=site)

    manage("startapp", "notes")
    (site / "notes/models.py").write_text(MODELS)
    (site / "notes/jobs.py").write_text(handlers_of_the_readme())
    with (site / "mysite/settings.py").open("a") as file:
        file.write('INSTALLED_APPS += ["rangefilter", "myxo_jobs", "notes"]\n')
        file.write(f'DATABASES = {{"default": {empty_database!r}}}\n')

    manage("makemigrations", "notes")
    assert "No changes detected" in manage("makemigrations", "--check")
    manage("migrate", "--verbosity", "0")
    assert "no issues" in manage("check")
    assert "put None" in manage("shell", "-c", PUT)
    said = manage("runjobs", "--drain")
    assert "started" in said
    assert "Traceback" not in said
    assert "words 4" in manage("shell", "-c", SEE)
