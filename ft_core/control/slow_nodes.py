"""What is done about roles that are slow (`--ft-straggler`): they are named, and with `replace` their node is
taken out between two steps.

Only where that can but help, and never in circles: there is room on nodes against which nothing is known,
no other node is on its way out, few roles are slow, and none was taken out for this within the
last hour. Who has nobody to be compared with is named only. Who was taken out is not used while there is
another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ft_core.control.changeovers import Changeovers
from ft_core.control.cluster.node import Node
from ft_core.control.liveness import strikes
from ft_core.control.liveness.stragglers import MOST, Finding, Over, Stragglers
from ft_core.control.phases import Running
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol.messages import NodeName, RoleBeat

MANY = 8
"""One of so many nodes may be slow at once: if there are more, none is taken out."""
LOOK = 1.0
"""Seconds between two looks at whether a node can be taken out."""


class SlowNodes:
    """What one controller does about slow roles."""

    def __init__(self, recovery: RecoveryCoordinator, changeovers: Changeovers) -> None:
        self._recovery, self._changeovers = recovery, changeovers
        self._cluster, self._out = recovery.cluster, recovery.out
        self.stragglers = Stragglers()
        self._look_at = -math.inf
        self._told: dict[int, str] = {}
        """By role, what was said last of why it stays."""

    def tick(self) -> None:
        """While all train, and nothing else is under way that slows some of them."""
        cluster, out = self._cluster, self._out
        if cluster.settings.straggler == "off" or not self._trains:
            return
        for each in self.stragglers.look(cluster.groups.alike(), cluster.places, self._heard, out.now):
            self._record(each)
        self._told = {role: why for role, why in self._told.items() if role in self.stragglers.found}
        if cluster.settings.straggler == "replace" and self.stragglers.found and out.now >= self._look_at:
            self._look_at = out.now + LOOK
            if not cluster.draining and not self._changeovers.objection():
                self._replace_one()

    def _heard(self, node: NodeName) -> Mapping[int, RoleBeat]:
        found = self._cluster.nodes.get(node)
        return found.beats if found is not None else {}

    @property
    def _trains(self) -> bool:
        recovery = self._recovery
        return (
            isinstance(recovery.phase, Running)
            and recovery.progress.all_stepped
            and not recovery.protection.unprotected
            and not recovery.completion.released
            and recovery.prestart.attempt is None
            and not recovery.leaving
            and not self._cluster.current_plan.absent  # others may do the part of those who are away
        )

    def _record(self, news: Finding | Over) -> None:
        over = isinstance(news, Over)
        found = news.finding if isinstance(news, Over) else news
        words = found.words
        if isinstance(news, Over):
            words = f"role {found.role} on {found.node} is not slow any more: {news.why}"
        about = {"node": found.node, "part": found.part, "score": found.score, "over": over}
        self._out.record("straggler", words, [found.role], None, **about)

    def _replace_one(self) -> None:
        """The slowest whose node can be taken out."""
        for found, node, objection in self.candidates():
            if not objection:
                self._recovery.strike(strikes.of_slow(found), node.hello.domain)
                self._recovery.tell_of_strikes()  # first: whoever takes over knows that it was done
                self._changeovers.drain_slow(node, found.words)
                return
            if self._told.get(found.role) != objection:
                self._told[found.role] = objection
                self._out.record("not_drained", objection, [found.role], None, node=node.name)

    def candidates(self) -> Iterator[tuple[Finding, Node, str]]:
        """The slowest roles, each with its node and why that stays, if so."""  # INV-26 (slow)
        cluster, now = self._cluster, self._out.now
        found = self.stragglers.found.values()
        slow = {each.node for each in found}
        if len(slow) * MANY > len(cluster.roles_by_node) + MANY:
            return  # that many are no exception: the machines differ, or the work does
        unfit = cluster.avoided(now) | cluster.faulted(now).keys() | slow
        before = cluster.strikes.moved_as_slow(now)
        for each in sorted(found, key=lambda each: -each.score)[:MOST]:
            node = cluster.nodes.get(each.node)
            if node is None or each.alone or not self.stragglers.stands_out(each):
                continue
            why = f"role {each.role} is slow, and {before} was taken out for a slow role within the last hour"
            draining = self._recovery.draining
            yield each, node, why if before else draining.objection(cluster, node.name, unfit)
