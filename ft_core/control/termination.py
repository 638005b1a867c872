"""SIGTERM, to the job or to one of its nodes: what ends because of it is not replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

from ft_core.process.sigterm import GRACE

SIGNAL_LAG = 0.02
"""Seconds in which the controller's process notices a signal that it was sent before a message."""


@dataclass
class Termination:
    """What is known of the signal: who has ended of it, and until when the others may."""

    _left: list[tuple[str, float]] = field(default_factory=list)
    """Nodes of which all workers have ended of it, and when they have said so."""
    _ends: tuple[float, str] | None = None

    def node_left(self, node: str, now: float) -> None:
        """Where `ftrun` has told all, this process was first, but may read the signal afterwards."""
        self._left.append((node, now))

    def nodes_left(self, now: float) -> list[str]:
        """Those of which it is clear by now whether the job was told as well."""
        due = [node for node, at in self._left if now - at > SIGNAL_LAG]
        self._left = [(node, at) for node, at in self._left if now - at <= SIGNAL_LAG]
        return due

    def end_later(self, node: str, now: float) -> None:
        """The first node has left of a job that was told to end: others' workers may outlive it a while."""
        if self._ends is None:
            reason = f"it was told to end (SIGTERM); some workers handle that, but not those of {node}"
            self._ends = now + GRACE, reason

    def overdue(self, now: float) -> str:
        """Why the job ends now, if so."""
        return self._ends[1] if self._ends is not None and now > self._ends[0] else ""
