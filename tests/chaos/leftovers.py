"""Things outside a run's folder, named after its process, so that the next run can tell
what a killed one has left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import psutil

from tests.chaos.rig import NotPossibleError

PREFIX = "myxo-chaos"


def name_of(what: str) -> str:
    """Return a name for a thing of this run."""
    return f"{PREFIX}-{os.getpid()}-{what}"


def is_left_over(name: str) -> bool:
    """Tell whether a thing of this name belongs to a run that is no more."""
    found = re.search(rf"{PREFIX}-(\d+)-", name)
    return found is not None and not psutil.pid_exists(int(found[1]))


def need(*programs: str) -> None:
    """Raise NotPossibleError unless root runs this and these programs are there."""
    if os.geteuid() != 0:
        raise NotPossibleError("it needs root")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise NotPossibleError(f"there is no {', '.join(missing)}")


def do(*command: str) -> str:
    """Run a command of the system; return what it says. Raises NotPossibleError if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise NotPossibleError(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout
