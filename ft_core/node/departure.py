"""SIGTERM for a worker: whether it is where it can be sent."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def pass_on(pid: int, even_so: bool) -> bool:
    """Send SIGTERM to a process that handles it, or else, if `even_so`, does not ignore it. Returns whether
    it was sent."""
    if not _does("SigCgt", pid) and (not even_so or _does("SigIgn", pid)):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    return True


def _does(what: str, pid: int) -> bool:
    """Whether process `pid` catches (SigCgt) or ignores (SigIgn) SIGTERM."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(what):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False
