"""What this node's devices have reported, for as long as it counts. No input, no output, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from ft_core.protocol.messages import DeviceFinding, FailureRecord

APART = 60.0
"""Seconds in which a device's report of the same is no news."""
_MOST = 32
"""Reports that are said again to another controller, the newest."""


class Reported:
    """The device reports of one agent."""

    def __init__(self, keep: float) -> None:
        """`keep`: seconds for which a report counts."""
        self._keep = keep
        self._all: deque[tuple[float, DeviceFinding]] = deque(maxlen=_MOST)
        self._counted: set[tuple[int, str]] = set()
        """Device and signature of reports that a controller has counted."""

    def add(self, finding: DeviceFinding, now: float) -> bool:
        """Keep a report. Returns whether it is news."""
        if any(now - at < APART and _key(known) == _key(finding) for at, known in self._all):
            return False
        self._all.append((now, finding))
        return True

    def again(self, now: float) -> list[DeviceFinding]:
        """The reports that are said again to a controller that may not know them."""
        return [replace(finding, age=now - at) for at, finding in self._all if now - at < self._keep]

    def counts(self, here: Iterable[FailureRecord]) -> None:
        """Take in all that counts against this node. What no longer does was forgiven, and is not said
        again."""
        known = {(each.device, each.signature) for each in here}
        forgiven = self._counted - known
        self._all = deque((each for each in self._all if _key(each[1]) not in forgiven), _MOST)
        self._counted = known & {_key(finding) for _, finding in self._all}


def _key(finding: DeviceFinding) -> tuple[int, str]:
    return finding.device, finding.signature
