"""A drive that counts its flushes and takes as long for each as a scenario says."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.benchmarks.evidence import Void

SOURCE = Path(__file__).with_name("drive.c")


class Drive(msgspec.Struct, frozen=True):
    """What lets a process use this drive: its environment. A loaded shim stands in for it."""

    environment: dict[str, str]
    count: Path

    def flushes(self) -> int:
        """Return how often the processes that use it have flushed."""
        return int(struct.unpack("=q", self.count.read_bytes())[0])


@contextmanager
def drive(milliseconds: float = 0.0) -> Iterator[Drive]:
    """Build the shim; each flush of a process that loads it takes so much longer.

    Raises Void where there is no C compiler.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Void("there is no C compiler to build the shim of the drive with")
    with tempfile.TemporaryDirectory(prefix="myxo-drive-") as folder:
        shim, count = Path(folder, "drive.so"), Path(folder, "count")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", shim, SOURCE, "-ldl"], check=True
        )
        count.write_bytes(struct.pack("=q", 0))
        environment = {
            "LD_PRELOAD": str(shim),
            "MYXO_DRIVE_COUNT": str(count),
            "MYXO_DRIVE_MILLISECONDS": str(milliseconds),
        }
        yield Drive(environment, count)
