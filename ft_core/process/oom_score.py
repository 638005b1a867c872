"""Whom the kernel ends where memory runs out."""

from __future__ import annotations

import contextlib
from pathlib import Path

_OWN = Path("/proc/self/oom_score_adj")
_MOST = 1000
"""The highest score: it counts for as much as all of the memory that there is."""


def go_first() -> None:
    """Let this process, and those that it starts, be ended before the agent: that has mapped all copies of
    its roles' state, so to the kernel it is the largest, and its end is that of the node. What this was told
    before still counts among others (`choom`, a pod's class)."""
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it is not to be written
        _OWN.write_text(str(min(_MOST, int(_OWN.read_text()) + _MOST)))
