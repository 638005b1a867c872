"""The calls that a script has made since a version that a recovery may go back to."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ft_deepspeed.calls import Call


class Tape:
    """Leads from any version since `covered` to where the script is."""

    def __init__(self, covered: int = 0) -> None:
        self.covered = covered
        """The oldest version from which it does."""
        self._calls: list[Callable[[], Call | None]] = []

    def record(self, call: Call) -> None:
        """It was made, and has had its effect."""
        self._calls.append(lambda: call)

    def record_while_there(self, call: Call) -> None:
        """It was made, and has an effect if something goes on from it: the script, or another call."""
        self._calls.append(weakref.ref(call))

    def since(self, version: int) -> list[Call]:
        """The calls that lead on from `version`."""
        return [call for found in self._calls if (call := found()) is not None and call.version >= version]

    def count(self, version: int, kind: str) -> int:
        """How many of a kind were made in the step after `version`."""
        return sum(call.version == version and call.kind == kind for call in self.since(version))

    def forget_before(self, version: int) -> None:
        """No recovery goes back further."""
        self.covered = max(self.covered, version)
        self._calls[:] = [
            found for found in self._calls if (call := found()) is not None and call.version >= self.covered
        ]

    def objection(self, version: int, interrupted: Call | None) -> str:
        """Why nobody gets from `version` to where the script is, through the call that was interrupted."""
        if version < self.covered:
            return f"its calls between step {version} and step {self.covered} are not known any more"
        calls = [*self.since(version), *([interrupted] if interrupted is not None else [])]
        return next((call.again for call in calls if call.again), "")
