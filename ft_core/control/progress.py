"""How far the roles are in the epoch under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ft_core.protocol.messages import JobState, Reopened, Restored, Stepped

Due = tuple[str, dict[str, Any]]
"""An event, with what belongs to it."""


@dataclass
class Progress:
    """What they have said. An event comes of it once all have."""

    restored: dict[int, int] = field(default_factory=dict)
    """Role -> pid of its worker."""
    stepped: set[int] = field(default_factory=set)
    reopened: set[int] = field(default_factory=set)

    def heard(self, state: JobState, message: Restored | Stepped | Reopened) -> Due | None:
        """The event that is due, if one is. `state` is the plan of the message's epoch."""
        roles = set(state.roles)
        if isinstance(message, Restored):
            self.restored[message.role] = message.pid
            about = {"version": state.version, "pids": dict(self.restored)}
            return ("state_restored", about) if roles <= set(self.restored) else None
        if isinstance(message, Stepped):
            self.stepped.add(message.role)
            return ("resumed", {"version": message.version}) if self.all_stepped(state) else None
        self.reopened.add(message.role)
        survivors = roles - set(state.newcomers)
        return ("communicators_ready", {}) if survivors and survivors <= self.reopened else None

    def all_stepped(self, state: JobState) -> bool:
        """Whether all have finished a step."""
        return set(state.roles) <= self.stepped
