"""Learning that a file was written, from Linux itself (inotify): Python has no call for it."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

IN_MODIFY = 0x00000002  # inotify(7)
READ_BYTES = 65_536


class FileNotices:
    """Tells that one of some files was written. A file that is not there yet is passed over.

    Raises OSError where the system has no such notices, or no more of them, and where none
    of the files is there.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        if sys.platform != "linux":
            raise OSError("only Linux has inotify")
        try:
            import ctypes  # not at the top: some builds of Python do without
        except ImportError as error:
            raise OSError("this Python has no ctypes") from error
        self._files = [os.fsencode(file) for file in files]
        self._system = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self._descriptor = self._system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(self._errno(), "inotify_init1 failed")
        try:
            self._watch()
        except OSError:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def _watch(self) -> None:
        """Watch what is there. Watching a file again changes nothing."""
        is_one_there = False
        for file in self._files:
            if self._system.inotify_add_watch(self._descriptor, file, IN_MODIFY) >= 0:
                is_one_there = True
            elif self._errno() != errno.ENOENT:
                raise OSError(self._errno(), "inotify_add_watch failed")
        if not is_one_there:
            raise FileNotFoundError(errno.ENOENT, "there is no file to watch")

    def wait(self, seconds: float) -> bool:
        """Wait for a write, and tell whether there was one since the last call."""
        with suppress(OSError):
            self._watch()  # a file may have been made, or replaced by another
        if not self._poll.poll(seconds * 1e3):
            return False
        with suppress(BlockingIOError):
            os.read(self._descriptor, READ_BYTES)  # which writes they were is not needed
        return True

    def close(self) -> None:
        os.close(self._descriptor)
