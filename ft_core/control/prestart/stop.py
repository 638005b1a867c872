"""Has all roles that train stop at the end of the same step, so that an epoch can begin between two.

A step that is cut off is done again, so they are asked to stop where one ends, and all after the same one,
which has to lie ahead of everybody: each first says how far it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ft_core.control.cluster.node import sends_to
from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import Effect, Record
from ft_core.protocol.messages import PauseAfterStep, RoleBeat, SendHeartbeat

NOTICE = 2
"""Steps between the newest that anybody has done and the one after which all stop: enough for all to hear."""
STEPS = 5
"""Steps after which those who train are interrupted: they do something else (evaluation, a checkpoint)."""
SKEW = 0.25
"""Seconds between the first and the last role's end of a step; who takes longer has missed the request."""
ASK_AGAIN = 2.5
"""Seconds between the first and the last role's end of a step, where nobody's step is to be cut off: then all
are asked again, as none of them waits any more."""


@dataclass
class Stop:
    """A request to stop. A role stops where a version is protected, so that nothing is done again."""

    patient: bool
    """Whether nobody's step is to be cut off, however long that takes."""
    unheld: set[int]
    """Roles that have yet to stop."""
    unheard: set[str] = field(default_factory=set)
    """Nodes that have yet to say how far those who train have come."""
    held: bool = False
    """Whether some role has stopped."""
    no_later_than: float = 0.0
    """When all are asked again, or interrupted, as long as no role has stopped; after that, when those that
    have not have missed the request."""
    asked: int = 0
    """How often all were asked."""
    epoch: int = 0

    def ask(self, cluster: ClusterState, now: float) -> list[Effect]:
        """Ask all who train how far they are."""
        longest = max((beat.step_s for beat in _beats(cluster)), default=0.0)
        every, self.epoch = cluster.current_plan.every, cluster.epoch
        self.asked += 1
        self.no_later_than = now + (STEPS + every) * longest + 1
        self.unheard = {node.name for node in cluster.nodes_with_roles()}
        return sends_to(cluster.nodes_with_roles(), SendHeartbeat())

    def ask_again(self, cluster: ClusterState, now: float) -> list[Effect]:
        """Ask all once more, where nobody's step is to be cut off and not all have stopped after the same
        one."""
        if not self.patient or now <= self.no_later_than:
            return []
        self.held, self.unheld = False, set(cluster.places)
        return self.ask(cluster, now)

    def on_beat(self, cluster: ClusterState, node: str) -> list[Effect]:
        """A node's heartbeat says how far its roles have come."""
        if node not in self.unheard:
            return []
        self.unheard.discard(node)
        if self.unheard:
            return []
        newest = max((beat.step for beat in _beats(cluster)), default=0)
        return sends_to(cluster.nodes_with_roles(), PauseAfterStep(epoch=cluster.epoch, step=newest + NOTICE))

    def on_paused(self, cluster: ClusterState, role: int, now: float) -> list[Effect]:
        """A role has stopped at the end of its step. So do all, or hardly later."""
        self.unheld.discard(role)
        if self.held:
            return []
        self.held = True
        self.no_later_than = now + (ASK_AGAIN if self.patient else SKEW)
        return [Record("held", cluster.epoch, "the others stop at the end of a step", (role,))]

    def due(self, now: float) -> bool:
        """Whether the epoch is to begin now, since nobody would be disturbed by it."""
        late = not self.patient and now > self.no_later_than  # INV-23 (drains): all have stopped
        return not self.unheld or late


def release(cluster: ClusterState) -> list[Effect]:
    """Tell all who train that they need not stop after all."""
    return sends_to(cluster.nodes_with_roles(), PauseAfterStep(epoch=0, step=0))


def _beats(cluster: ClusterState) -> list[RoleBeat]:
    """What the heartbeats say of those who train."""
    return [beat for node in cluster.nodes_with_roles() for beat in node.beats.values()]
