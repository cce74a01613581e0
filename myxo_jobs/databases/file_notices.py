"""Learning that a file was written, from Linux itself (inotify): Python has no call for it."""

from __future__ import annotations

import ctypes
import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

IN_MODIFY = 0x00000002  # inotify(7)
READ_BYTES = 65_536


class FileNotices:
    """Tells that one of some files was written. A file that is not there is passed over.

    Raises OSError where the system has no such notices, or no more of them.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        if sys.platform != "linux":
            raise OSError("only Linux has inotify")
        self._files = [os.fsencode(file) for file in files]
        self._system = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        if not self._watch():
            self.close()
            raise OSError(ctypes.get_errno(), "inotify_add_watch failed")
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def _watch(self) -> bool:
        """Watch what is there; tell whether anything is. Watching a file again changes nothing."""
        watches: list[int] = [
            self._system.inotify_add_watch(self._descriptor, file, IN_MODIFY)
            for file in self._files
        ]
        return max(watches) >= 0

    def wait(self, seconds: float) -> bool:
        """Wait for a write, and tell whether there was one since the last call."""
        self._watch()  # a file may have been made, or replaced by another
        if not self._poll.poll(seconds * 1e3):
            return False
        with suppress(BlockingIOError):
            os.read(self._descriptor, READ_BYTES)  # which writes they were is not needed
        return True

    def close(self) -> None:
        os.close(self._descriptor)
