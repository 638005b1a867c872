"""Connections that are refused: told one by one as long as they are few, then by number."""

from __future__ import annotations

import time
from collections.abc import Callable

TOLD = 10
"""That many in a period are told one by one."""
PERIOD = 60.0
"""Seconds."""


class Refusals:
    """Whoever tries again and again fills no disk. `tell` is called with what to write down."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._since = 0.0
        self._count = 0
        self._newest = ""

    def add(self, reason: str) -> None:
        """A connection was refused."""
        self.tick()
        self._count += 1
        self._newest = reason
        if self._count <= TOLD:
            self._tell(reason)

    def tick(self) -> None:
        """Called from time to time."""
        now = time.monotonic()
        if now - self._since < PERIOD:
            return
        if (more := self._count - TOLD) > 0:
            self._tell(f"{more} more connections within {PERIOD:.0f} s; the last: {self._newest}")
        self._since, self._count = now, 0
