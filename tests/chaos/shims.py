"""Small C libraries that are preloaded into a process, to make its machine behave badly."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.chaos.leftovers import need
from tests.chaos.rig import Rig


def preloaded(rig: Rig, name: str) -> dict[str, str]:
    """Compile the C file of a name that stands beside this one; return what preloads it."""
    need("gcc")
    library = rig.folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
