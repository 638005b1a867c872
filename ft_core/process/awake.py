"""Time in which this process was awake, for judging others by their silence.

Who was stopped, or was held up by its own work, has heard nobody meanwhile: what was said lies unread in its
sockets. Time by the wall would have it declare everybody dead at the first look.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Advances when it is told to, by what has passed since, and by no more than `bound` seconds.

    It is told once per turn of an event loop's ticker. Between two turns the loop reads every socket that
    has something, so s seconds of silence on this clock mean s / bound looks at the silent one's socket.
    """

    def __init__(self, bound: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._bound, self._monotonic = bound, monotonic
        self._last = monotonic()
        self.now = 0.0
        """Seconds awake since the beginning, as of the last tick."""

    def tick(self) -> float:
        """Advance. Returns `now`."""
        last, self._last = self._last, self._monotonic()
        self.now += min(self._last - last, self._bound)
        return self.now
