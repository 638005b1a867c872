"""How far the roles are in the epoch under way."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from ft_core.protocol.messages import Plan, Reopened, Restored, Stepped


@dataclass(frozen=True)
class Due:
    """An event that is to be recorded, since all roles have come so far."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Awaited:
    """What all roles are to have next, and those that do not have it yet."""

    what: Literal["state", "step"]
    roles: Set[int]


class Progress:
    """What the roles have said. An event comes of it once all have; what is still awaited is counted down,
    since each message comes from each role."""

    def __init__(self, plan: Plan) -> None:
        """`plan`: the plan of the epoch."""
        self.restored: dict[int, int] = {}
        """Role -> pid of its worker."""
        self._version = plan.version
        self._unrestored, self._unstepped = set(plan.roles), set(plan.roles)
        self._closed = set(plan.roles).difference(plan.newcomers)
        """Survivors that have not said that they have their communicators."""

    def on_progress(self, message: Restored | Stepped | Reopened) -> Due | None:
        """The event that is due, if one is."""
        role = message.role  # INV-15 (events): one comes of the last one that is awaited
        if isinstance(message, Restored):
            self.restored[role] = message.pid
            if not _last(self._unrestored, role):
                return None
            return Due("state_restored", {"version": self._version, "pids": dict(self.restored)})
        if isinstance(message, Stepped):
            return Due("resumed", {"version": message.version}) if _last(self._unstepped, role) else None
        return Due("communicators_ready", {}) if _last(self._closed, role) else None

    @property
    def awaited(self) -> Awaited:
        """What is waited for now, and of whom."""
        return Awaited("state", self._unrestored) if self._unrestored else Awaited("step", self._unstepped)

    @property
    def all_restored(self) -> bool:
        """Whether all have their state."""
        return not self._unrestored

    @property
    def all_stepped(self) -> bool:
        """Whether all have finished a step."""
        return not self._unstepped


def _last(awaited: set[int], role: int) -> bool:
    """Take a role off `awaited`. Returns whether it was the last."""
    if role not in awaited:
        return False
    awaited.remove(role)
    return not awaited
