"""What the kernel has said since somebody began to listen, where it may be read: as a rule by root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

PATH = "/dev/kmsg"
_RECORD = 8192
"""Bytes of the largest record in it."""
_AT_ONCE = 256
"""Records, at most, that are read in one go: others wait."""


class KernelLog:
    """The kernel's messages from now on."""

    def __init__(self, path: str = PATH) -> None:
        self._log = -1
        with contextlib.suppress(OSError):
            self._log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def records(self) -> Iterator[str]:
        """What has come since. Never waits."""
        for _ in range(_AT_ONCE if self._log >= 0 else 0):
            try:
                record = os.read(self._log, _RECORD)
            except BrokenPipeError:
                continue  # some were overwritten
            except OSError:  # no more of them
                return
            if not record:
                return
            yield record.decode(errors="replace")
