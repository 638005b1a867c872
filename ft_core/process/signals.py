"""What another process does with signals."""

from __future__ import annotations

import contextlib
from pathlib import Path


def catches(pid: int, number: int) -> bool:
    """Whether process `pid` handles that signal."""
    return _has("SigCgt", pid, number)


def ignores(pid: int, number: int) -> bool:
    """Whether process `pid` ignores that signal."""
    return _has("SigIgn", pid, number)


def _has(what: str, pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(what):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
