"""Nodes whose machines are about to go: by a notice (`node.notices`), by SIGTERM to a node alone, or since a
device of theirs is not to be relied on.

Each is drained as if somebody had asked for it. A notice that cannot be followed yet is kept, and tried again
whenever that may help. SIGTERM is answered: either the node's roles move, or its workers get the signal. All
nodes get it one after the other where the whole job is to end, so the answer waits a moment for the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import Effect, Record, Send
from ft_core.control.prestart.attempts import Prestart
from ft_core.control.prestart.draining import Draining, can_shrink
from ft_core.process.sigterm import GRACE
from ft_core.protocol.domains import place
from ft_core.protocol.messages import Drain, NodeName, Notice

OTHERS = 1.0
"""Seconds in which the other nodes are told to end, if they are."""
HELD_UNTIL = GRACE / 2
"""Seconds before its machine may be gone, in which a node's own workers may save."""
AGAIN = 30.0
"""Seconds until a node is drained once more whose roles could not start elsewhere; and in which other words
for a notice that leaves it no less time are no news."""
SELDOM = 3600.0
"""The longest such time, which grows from try to try."""
LOOK = 1.0
"""Seconds until it is looked again whether a node can be drained: that takes a while in a large job."""
SOONER = 1.0
"""Seconds of which a notice has to leave less to be more urgent than the one before."""
SIGTERM = "it was told to end (SIGTERM)"


@dataclass
class _Going:
    """A node that is about to go."""

    reason: str
    deadline: float
    not_before: float
    said_at: float = -math.inf
    """When the reason was told last."""
    told: bool = False
    """Whether it has got SIGTERM, and waits for the answer."""
    drained: bool = False
    """Whether it is being drained."""
    sick: bool = False
    """Whether a device of its is not to be relied on."""
    sick_since: float = -math.inf
    """When that was said last."""
    pause: float = AGAIN
    """Seconds until it is drained once more, should that come to nothing."""
    noticed: bool = False
    """Whether somebody announces its machine's end, and may take that back."""
    why_not: str = ""
    """What was said last of why it is not."""

    def may_stay(self, now: float) -> bool:
        """Whether it was told to end, and has time enough left to be needed meanwhile."""
        return self.told and now < self.deadline - HELD_UNTIL


class Notices:
    """What the nodes of one job have announced."""

    def __init__(self) -> None:
        self._going: dict[NodeName, _Going] = {}

    def on_notice(self, cluster: ClusterState, node: Node, notice: Notice, now: float) -> list[Effect]:
        """A node says that its machine is about to go; or not any more, and then a drain goes on."""
        known = self._going.get(node.name)
        if not notice.reason:
            if known is not None and known.sick:
                known.deadline, known.noticed = math.inf, False
            elif known is not None and not known.told:
                del self._going[node.name]
            return []
        deadline = math.inf if notice.seconds is None else now + notice.seconds
        if known is not None:
            urgent = deadline < known.deadline - SOONER
            deadline = min(deadline, known.deadline) if known.told else deadline
            known.noticed = True
            if known.reason == notice.reason or (not urgent and now < known.said_at + AGAIN):
                known.deadline = deadline
                return []
            known.reason, known.deadline, known.said_at = notice.reason, deadline, now
            if urgent:
                known.not_before, known.why_not = min(known.not_before, now), ""
        else:
            drained = node.name in cluster.draining
            self._going[node.name] = _Going(notice.reason, deadline, now, now, drained=drained, noticed=True)
        roles = tuple(cluster.roles_by_node.get(node.name, ()))
        return [Record("notice", cluster.epoch, notice.reason, roles, _more(node.name, notice.seconds))]

    def sick(self, cluster: ClusterState, node: Node, why: str, now: float) -> None:
        """A device of a node is not to be relied on; said again, that is known."""
        if (known := self._going.get(node.name)) is None:
            drained = node.name in cluster.draining
            known = self._going[node.name] = _Going(why, math.inf, now, drained=drained)
        known.sick, known.sick_since = True, now

    def forgive(self, where: str) -> None:
        """Somebody has looked at that machine: its devices are no reason any more. What has begun goes on."""
        for name, going in list(self._going.items()):
            if place(name) == where and going.sick:
                going.sick = False
                if going.deadline == math.inf and not (going.told or going.drained or going.noticed):
                    del self._going[name]

    def on_told(self, cluster: ClusterState, node: Node, now: float) -> list[Effect]:
        """A node has got SIGTERM; said again with each greeting, that is as old as it was."""
        known = self._going.get(node.name)
        deadline = known.deadline if known is not None and known.told else now + GRACE
        if node.name in cluster.draining:
            self._going[node.name] = _Going(SIGTERM, deadline, now, told=True, drained=True)
            return [Send(node.peer, Drain(wanted=True))]
        self._going[node.name] = _Going(SIGTERM, deadline, now + OTHERS, told=True)
        return []

    def tick(
        self,
        cluster: ClusterState,
        draining: Draining,
        prestart: Prestart,
        now: float,
        *,
        why_not: str,
        recovers: bool,
        job_leaves: bool,
    ) -> list[Effect]:
        """Drain the nodes that can be drained by now. `why_not`: why no drain can begin at present, though it
        may once the job has recovered (`recovers`). `job_leaves`: the whole job was told to end."""
        effects: list[Effect] = []
        for name, going in sorted(self._going.items(), key=lambda each: each[1].deadline):
            node = cluster.nodes.get(name)
            if node is None:
                del self._going[name]
                draining.held.discard(name)
            elif going.told and job_leaves:
                del self._going[name]
                effects += [*draining.forget(cluster, prestart, name), Send(node.peer, Drain(wanted=False))]
            elif name in cluster.draining:
                going.drained = True
                draining.goes_by(cluster, name, going.deadline)
            elif going.drained:  # given up, and said so
                going.drained, going.not_before = False, now + going.pause
                going.pause = min(2 * going.pause, SELDOM)
                if going.told or not (going.sick or going.noticed):
                    del self._going[name]
            elif going.sick and now - going.sick_since > cluster.strikes.seconds:  # as its strike
                going.sick = False
                if not (going.told or going.noticed):
                    del self._going[name]
            elif name not in cluster.roles_by_node and not (going.told or going.noticed):
                pass  # it is avoided, and needed if no other is left
            elif recovers and going.may_stay(now):
                if now >= going.not_before:
                    effects += self._hold(draining, node)
            elif now >= going.not_before:
                effects += self._begin(cluster, draining, prestart, node, going, why_not, now)
        return effects

    @staticmethod
    def _hold(draining: Draining, node: Node) -> list[Effect]:
        """Have a node that was told to end stay for now."""
        if node.name in draining.held:
            return []
        draining.held.add(node.name)
        return [Send(node.peer, Drain(wanted=True))]

    def _begin(
        self,
        cluster: ClusterState,
        draining: Draining,
        prestart: Prestart,
        node: Node,
        going: _Going,
        why_not: str,
        now: float,
    ) -> list[Effect]:
        # Who is sick goes where it is better, and nowhere else; who is about to go, wherever there is room.
        unfit = cluster.avoided(now) if going.sick and going.deadline == math.inf else ()
        objection = why_not or draining.objection(cluster, node.name, unfit)
        if not why_not and going.deadline < math.inf and can_shrink(cluster, node.name):
            objection = ""
        alone = cluster.roles_by_node.keys() == {node.name}
        if objection and alone and going.may_stay(now):
            return self._hold(draining, node)  # all that there is of the job: another node may come for it
        draining.held.discard(node.name)
        if not objection:
            going.drained = True
            return draining.begin(cluster, prestart, node.name, going.reason, going.deadline)
        if going.told:
            del self._going[node.name]
            return [Send(node.peer, Drain(wanted=False))]
        if why_not:
            return []
        going.not_before = now + LOOK
        if objection == going.why_not:
            return []
        going.why_not = objection
        roles = tuple(cluster.roles_by_node.get(node.name, ()))
        return [Record("not_drained", cluster.epoch, objection, roles, {"node": node.name})]


def _more(node: NodeName, seconds: float | None) -> dict[str, object]:
    return {"node": node} if seconds is None else {"node": node, "seconds": round(seconds, 1)}
