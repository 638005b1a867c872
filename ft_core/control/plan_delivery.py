"""How nodes learn of the plan: the newest as it is made, all of it where one has missed the one before."""

from __future__ import annotations

from collections.abc import Mapping

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide import plans
from ft_core.control.events import Effect, Send
from ft_core.protocol import messages as m
from ft_core.protocol.table import changes, pieces


class PlanDelivery:
    """What of the newest plan is sent to whom."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._own: dict[m.NodeName, m.OwnPlan] = {}
        """What single nodes must know of the plan."""
        self._whole: list[m.Hosts | m.SharedPlan] = []
        """The plan for nodes that do not know the one before, once it was asked for."""
        self._without_roles: tuple[Mapping[m.NodeName, m.NodeAddress], m.NodesChanged] | None = None
        """The plan's nodes, and those without a role among them, as a message."""

    def new_plan(self, own: dict[m.NodeName, m.OwnPlan] | None = None) -> None:
        """There is another plan. `own`: what single nodes must know of it; a former controller's has none."""
        self._own, self._whole = own or {}, []

    def to_all(self, before: m.Plan | None, now: float) -> list[Effect]:
        """Send the plan to all nodes: those that have begun the one `before` are told what is different."""
        cluster, plan = self._cluster, self._cluster.current_plan
        shared: m.SharedPlan | None = None
        # First what single nodes must know: what all are told stays one message to who speaks for many.
        own = ((cluster.nodes.get(name), order) for name, order in self._own.items())
        effects: list[Effect] = [Send(node.peer, order) for node, order in own if node is not None]
        for node in cluster.nodes.values():
            node.plan_sent_at = now
            if before is None or node.applied_plan != before.id:
                effects += [Send(node.peer, part) for part in self._whole_plan()]
                continue
            if shared is None:
                shared = m.SharedPlan(before.id, *changes(before, plan), plan.state)
            effects.append(Send(node.peer, shared))
        return effects

    def again_to(self, node: Node, now: float) -> list[Effect]:
        """Send all of the plan to a node that has not begun it."""
        node.plan_sent_at = now
        own = self._own.get(node.name)
        parts = [*([own] if own is not None else []), *self._whole_plan()]
        return [Send(node.peer, part) for part in parts]

    def nodes_without_roles(self) -> m.NodesChanged:
        """All nodes that have no role, for a node that may have missed who has come and gone."""
        plan = self._cluster.current_plan
        if self._without_roles is None or self._without_roles[0] is not plan.nodes:
            hosts = self._cluster.roles_by_node
            idle: dict[m.NodeName, m.NodeAddress | None] = {
                name: at for name, at in plan.nodes.items() if name not in hosts
            }
            self._without_roles = plan.nodes, m.NodesChanged(id=plan.id, nodes=idle, all=True)
        return self._without_roles[1]

    def node_changes(self) -> list[Effect]:
        """Tell all which nodes without a role have come or gone since: those keep copies for others."""
        if (changed := plans.nodes_changed(self._cluster)) is None:
            return []
        self._cluster.plan, news = changed
        self._whole = []
        return self._cluster.to_all(news)

    def _whole_plan(self) -> list[m.Hosts | m.SharedPlan]:
        plan = self._cluster.current_plan
        if not self._whole:
            self._whole = [*pieces(plan), m.SharedPlan(plan.id, [], [], plan.state)]
        return self._whole
