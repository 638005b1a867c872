"""What steps of a job usually take, and how long it may be without one: learned from those that were seen."""

from __future__ import annotations

from collections import deque
from statistics import median

LEAST = 60.0
"""Seconds without a step that are never too many."""
STEPS, TIMES = 20, 3
"""A time without a step is usual up to so many steps' time, and so many times the longest between two."""
_USUAL, _LONGEST = 64, 4096
"""How many of the newest steps are remembered for the one and for the other."""


class Pace:
    """How fast one job does its steps, as far as this controller has seen it."""

    def __init__(self, step: float) -> None:
        """`step`: seconds that one took, as a predecessor has seen; 0: not known."""
        self._steps = deque([step] if step else [], maxlen=_USUAL)
        self._between: deque[float] = deque(maxlen=_LONGEST)

    def add(self, step: float, seconds: float) -> None:
        """Enter that steps took `step` seconds on average, of those that were done within so many
        `seconds`."""
        self._steps.append(step)
        self._between.append(seconds)

    @property
    def usual(self) -> float:
        """Seconds of a step; 0: not known yet."""
        return median(self._steps) if self._steps else 0.0

    def patience(self, start: float) -> float:
        """Seconds without a step that are nothing to speak of: an evaluation that was there before takes no
        longer, nor, if one is under way, a start."""
        return max(LEAST, STEPS * self.usual, TIMES * max(self._between, default=0.0), TIMES * start)
