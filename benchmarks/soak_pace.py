"""A rest in each step of a job under random faults, which lasts as long as these take and ends soon after."""

from __future__ import annotations

import os
import time
from pathlib import Path

SHARE = "FT_SOAK_SHARE"
"""The environment variable with the path of a file that says which share of the faults is over."""
MOST = 0.5
"""Seconds that a step rests at most: no hang."""
_LOOK = 0.02


def rest(step: int, steps: int) -> None:
    """Before that one of so many, while a greater share of the steps is done than of the faults."""
    until = time.monotonic() + MOST
    while SHARE in os.environ and step / steps > _share() and time.monotonic() < until:
        time.sleep(_LOOK)


def _share() -> float:
    try:
        return float(Path(os.environ[SHARE]).read_text())
    except (FileNotFoundError, ValueError):  # it is being written
        return 0.0
