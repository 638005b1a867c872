"""Watching over the nodes: who is silent, who is asked about whom, and who is waited for to be seen again.

What is evidence of what, and what the verdict is, stands in `suspicion`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import Effect, Send
from ft_core.control.liveness.links import Links
from ft_core.control.liveness.suspicion import ASK, ASK_AGAIN, Steps, chosen
from ft_core.protocol.messages import NodeName, NodesProbed, PlanId, ProbeNodes, Version

LOOK = 1 / 20
"""How often all nodes are looked at for those that are silent, as a part of the limit of silence; whose
connection is gone is seen at once."""


class FailureDetector:
    """Watches over the nodes of one job."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.doubting: set[NodeName] = set()
        """Nodes of which a worker, or the agent, saw a connection to a peer break in this epoch, or where
        roles wait in vain."""
        self.broke = ""
        """What was seen to break in this epoch, the first time; empty: nothing, some only wait."""
        self.links = Links()
        self._steps = Steps()
        self._missed: dict[NodeName, float] = {}
        """Nodes of the plan that were lost since it was made, and when. They may live."""
        self._asked = -math.inf
        """When others were asked last about nodes that are missed."""
        self._round = 0
        self._quiet: tuple[float, list[NodeName]] = -math.inf, []
        """When all nodes were looked at last, and those that were silent then."""
        self._names: tuple[float, list[NodeName]] = -math.inf, []
        """When all nodes were put in order last, and their names."""

    def epoch_begins(self) -> None:
        """A plan was made: who is not in it is not waited for."""
        self._steps, self.links = Steps(), Links()
        self._missed.clear()

    def forget_broken(self) -> None:
        """What was seen to break is of an epoch that has ended, or was found to be whole."""
        self.doubting.clear()
        self.broke = ""
        self.links = Links()

    @property
    def suspects_link(self) -> bool:
        """Whether the cause of broken connections is being looked for, on behalf of a node that is there."""
        return self.links.suspected and not self.doubting.isdisjoint(self._cluster.nodes)

    # -- what is heard -----------------------------------------------------------------------------

    def on_greeting(self, name: NodeName) -> None:
        """A node is there, or there again."""
        self._missed.pop(name, None)

    def on_suspect(self, name: NodeName, reason: str, now: float) -> None:
        """A worker, or the agent, of a node saw connections break in this epoch."""
        self.broke = self.broke or reason
        self.doubting.add(name)
        self.links.suspect(now, training=True)

    def stuck(self, names: Collection[NodeName], now: float) -> None:
        """Roles on these nodes wait, and it is not clear why. Connections over a link that lets nothing
        through break after a quarter of an hour only; where all links are sound nothing comes of this."""
        self.doubting |= set(names)
        self.links.suspect(now, training=True)

    def look_again(self, link: str, now: float) -> None:
        """What was found cannot be mended now: find out anew whether it is still so."""
        self.broke = self.broke or link
        self.links.again(now)

    def fetch_failed(self, name: NodeName, reason: str, now: float) -> None:
        """A node could not fetch what others hold, as they have said."""
        self.links.suspect(now, training=False)
        self.on_suspect(name, reason, now)

    def on_beat(self, begun: PlanId, newest: Version, now: float) -> None:
        """A node says which plan it has, and how far the first of its roles is."""
        if begun == self._cluster.plan_id:
            self._steps.done(newest, now)

    def on_disconnected(self, node: Node, now: float) -> None:
        """The connection of a node has ended."""
        node.liveness.breaks(now, self._round + 1)
        self._cluster.disconnected.add(node.name)

    def on_probed(self, witness: Node, answer: NodesProbed) -> bool:
        """A node says which others it reaches. Returns whether one has ended, by that, whose connection
        has."""
        self.links.answered(witness.name, answer.reach)
        ended = False
        for name, reach in answer.reach.items():
            if (node := self._cluster.nodes.get(name)) is not None:
                node.liveness.answered(witness.name, reach, answer.round)
                ended |= bool(node.liveness.ended)
            elif reach == "refused":
                self._missed.pop(name, None)  # its machine is there, and its process is not
        return ended

    # -- silence -----------------------------------------------------------------------------------

    def lost(self, running: bool, now: float) -> list[tuple[Node, str]]:
        """Nodes that are lost, and why."""
        cluster, bound = self._cluster, self._cluster.settings.silence_limit
        quiet = [node for node in self._silent(now) if not node.liveness.lively(now, bound)]
        if not quiet:
            return []
        busy = cluster.roles_by_node if running else {}
        asked = any(node.liveness.answers and node.liveness.gone_since is None for node in quiet)
        witnesses = self._witnesses(now) if asked else set()
        found = []
        for node in quiet:
            lived = self._steps.lived if node.name in busy else -math.inf
            doubted = bool(self.doubting - {node.name})
            if why := node.liveness.lost(now, lived, bound, doubted, witnesses):
                found.append((node, why))
        return found

    def _silent(self, now: float) -> list[Node]:
        """Nodes that may be silent now, or gone."""
        nodes, bound = self._cluster.nodes, self._cluster.settings.silence_limit
        if now - self._quiet[0] >= LOOK * bound:
            self._quiet = now, [name for name, node in nodes.items() if not node.liveness.lively(now, bound)]
        names = dict.fromkeys([*self._quiet[1], *sorted(self._cluster.disconnected)])
        return [node for name in names if (node := nodes.get(name)) is not None]

    def questions(self, now: float) -> list[Effect]:
        """Questions to other nodes, about those that are silent or gone."""
        bound = self._cluster.settings.silence_limit
        asked: dict[NodeName, dict[NodeName, str]] = {}
        for node in self._silent(now):
            if node.liveness.doubtful(now, bound):
                node.liveness.asked = now
                for witness in self._witnesses_of(node.name, now):
                    asked.setdefault(witness, {})[node.name] = node.hello.data
        return self._ask(asked)

    def _witnesses_of(self, name: NodeName, now: float) -> list[NodeName]:
        """The nodes that are asked about one. Many may be gone at once: all names are not sorted anew for
        each of them."""
        nodes, bound = self._cluster.nodes, self._cluster.settings.silence_limit
        if now - self._names[0] >= ASK_AGAIN:
            self._names = now, sorted(nodes)

        def speaks(other: NodeName) -> bool:
            return (node := nodes.get(other)) is not None and node.liveness.lively(now, bound)

        return chosen(name, self._names[1], speaks)

    def _ask(self, asked: dict[NodeName, dict[NodeName, str]]) -> list[Effect]:
        """Ask each witness which of these addresses it reaches."""
        if asked:
            self._round += 1
        nodes = self._cluster.nodes
        return [Send(nodes[name].peer, ProbeNodes(self._round, about)) for name, about in asked.items()]

    def _witnesses(self, now: float) -> set[NodeName]:
        """The nodes that are heard themselves."""
        bound = self._cluster.settings.silence_limit
        return {name for name, node in self._cluster.nodes.items() if node.liveness.lively(now, bound)}

    def question_links(self, now: float) -> list[Effect]:
        """Questions to the nodes of the plan, about each other, where connections broke and no step
        finishes."""
        if not self.suspects_link:
            return []
        nodes = self._cluster.nodes
        concerned = set(self._cluster.current_plan.nodes) & set(nodes)
        sound = concerned <= self._witnesses(now)
        asked = self.links.tick(concerned, self.doubting, sound, self._steps.newest, now)
        return self._ask(
            {name: {o: nodes[o].hello.data for o in sorted(about)} for name, about in asked.items()}
        )

    # -- nodes out of sight ------------------------------------------------------------------------

    def miss(self, names: Collection[NodeName], now: float) -> None:
        """Note nodes that are lost, for all that is known; of the plan's nodes the memory may be there
        still."""
        if (plan := self._cluster.plan) is not None:
            self._missed |= {name: now for name in names if name in plan.nodes}

    def missed(self, now: float) -> list[NodeName]:
        """Nodes that may be seen again: for as long as a silent one would be waited for."""
        limit = self._cluster.settings.silence_limit
        return sorted(name for name, since in self._missed.items() if now - since < limit)

    def look_for(self, names: Collection[NodeName], now: float) -> list[Effect]:
        """Ask others whether the processes of those that are missed have ended."""
        if now - self._asked < ASK:
            return []
        self._asked = now
        known = self._cluster.current_plan.nodes
        asked: dict[NodeName, dict[NodeName, str]] = {}
        for name in sorted(set(names) & set(known)):  # a spare is forgotten with its address
            for witness in self._witnesses_of(name, now):
                asked.setdefault(witness, {})[name] = known[name].data
        return self._ask(asked)
