"""What it means for the job that a node is lost, cannot be reached, or does not reach another."""

from __future__ import annotations

from ft_core.control.cluster.node import Node
from ft_core.control.decide.next_epoch import can_be_spared
from ft_core.control.liveness import strikes
from ft_core.control.liveness.links import Broken
from ft_core.control.observe.observations import FirstSign
from ft_core.control.phases import Quiescing, Running, Waiting
from ft_core.control.prestart.draining import can_shrink
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.script_ends import ScriptEnds
from ft_core.protocol import messages as m
from ft_core.protocol.domains import place

_SEVERED = 60.0
"""Seconds for which two machines whose link was found broken are not thought to reach each other again."""


class NodeFailures:
    """The nodes that one controller loses sight of."""

    def __init__(self, recovery: RecoveryCoordinator, scripts: ScriptEnds) -> None:
        self._recovery, self._scripts = recovery, scripts
        self._cluster, self._out = recovery.cluster, recovery.out
        self._detector = recovery.failure_detector
        self._severed: dict[frozenset[str], float] = {}
        """Machines whose link was found broken of late, and when last."""

    def node_lost(self, node: Node, why: str, fault: m.Fault = m.Fault.NODE) -> None:
        """What happens when a node dies. `fault`: of which it did; but for `NODE`, it is not only out of
        sight.

        It is forgotten: what it says from now on is not heard, and should it come back after a plan was made
        without it, it joins as a spare (`Succession.turn_away_if_replaced`). If it was to bring a replica
        group back, that is given up, and nobody else notices. If it had roles, the epoch ends
        (`RecoveryCoordinator.fail`, `end_epoch`): all workers leave their step (`Abort`), the other agents
        report what they hold (`HoldingsChanged`), and once all have (`Decisions.settle`), other nodes get its
        roles (`next_epoch.decide`, `RecoveryCoordinator.start_epoch`), or the job waits for one. If it had
        none, nobody stops: the others are told where no more copies are to be kept.
        """
        cluster, recovery, out = self._cluster, self._recovery, self._out
        out.emit(*recovery.draining.on_node_lost(cluster, node.name))
        cluster.drop(node)
        out.emit(FirstSign(out.wall - node.liveness.silence(out.now)))
        if fault is m.Fault.NODE and not node.liveness.ended:
            self._detector.miss([node.name], out.now)
        out.close(node)
        if recovery.prestart.on(node.name):
            out.emit(*recovery.prestart.fail(cluster, f"node {node.name} is lost"))
        recovery.strike(strikes.of_node(node.name, node.hello.pid, fault), node.hello.domain)
        roles = cluster.roles_by_node.get(node.name, [])
        if roles:
            recovery.fail(f"node {node.name} lost: {why}", roles, fault=fault, node=node.name)
        else:
            out.record("spare_lost", f"node {node.name}: {why}", node=node.name)
            recovery.tell_of_nodes()
            recovery.reconsider()

    def on_restore_failed(self, node: Node, reason: str, role: int) -> None:
        """A role cannot have its state. Before it is decided again: does its node reach those who have it?"""
        self._recovery.fail(reason, [role])
        if self._recovery.recovering:
            self._detector.fetch_failed(node.name, reason, self._out.now)

    def on_suspect(self, node: Node, said: m.Suspect) -> None:
        """A worker saw connections break in this epoch."""
        self._detector.on_suspect(node.name, said.reason, self._out.now)
        self._out.record("suspected", said.reason, [said.role])
        if said.by_link:  # also where nobody has to be replaced
            self._recovery.strike(strikes.of_link(node.name, said), node.hello.domain)
            self._recovery.tell_of_strikes()
        self._scripts.escalate_if_waited_for()

    def on_disconnected(self, node: Node) -> None:
        """A node's connection has ended. It may come back, unless others find that its process has ended:
        they are asked at once."""
        self._detector.on_disconnected(node, self._out.now)
        self._judge()

    def on_probed(self, node: Node, answer: m.NodesProbed) -> None:
        """A node says which others it reaches."""
        if self._detector.on_probed(node, answer):
            self._judge()

    def tick(self) -> None:
        """Look who has been silent for too long and, where connections broke, who does not reach whom."""
        self._judge()
        phase = self._recovery.phase
        if isinstance(phase, Running | Quiescing | Waiting) and not self._recovery.protection.unprotected:
            self._out.emit(*self._detector.question_links(self._out.now))
            if self._detector.links.over:
                self._replace_broken_link_end()

    def _judge(self) -> None:
        """Judge the nodes that are silent or gone: which are lost, and which others are asked about."""
        running = isinstance(self._recovery.phase, Running)
        for node, why in self._detector.lost(running, self._out.now):
            self.node_lost(node, why)
        self._out.emit(*self._detector.questions(self._out.now))

    def _replace_broken_link_end(self) -> None:
        """All links were tried: replace one end of a broken one; if none is, begin an epoch with new
        connections."""
        cluster, recovery, now = self._cluster, self._recovery, self._out.now
        why = self._detector.broke
        first = {name: role for role, name in sorted(cluster.places.items(), reverse=True)}
        none = cluster.settings.world_size  # a node without a role is replaced rather than one with some
        failed = lambda name: len(cluster.strikes.against(place(name), now))  # noqa: E731
        broken = self._detector.links.found(cluster.nodes, failed, lambda name: first.get(name, none))
        replaced = ""
        if broken is not None:
            self._severed = {ends: at for ends, at in self._severed.items() if now - at < _SEVERED}
            self._severed[frozenset(map(place, broken.ends))] = now
            replaced = self._replaceable(broken)
        if broken is not None and not replaced:
            # What they hold would be lost, or they would come back to the same link.
            one, other = broken.ends
            self._detector.look_again(f"{one} and {other} did not reach each other", now)
            what = (
                f"nodes {one} and {other} do not reach each other, and neither can be replaced: no other "
                "node could take over, or it holds what nobody else does"
            )
            if recovery.note_wait_reason(what):
                recovery.tell_it_waits(what, [])
            return
        self._detector.forget_broken()
        if broken is not None:
            one, other = broken.ends
            node = cluster.nodes[replaced]
            roles = cluster.roles_by_node.get(node.name, [])
            what = f"nodes {one} and {other} do not reach each other; {node.name} is replaced"
            self._out.record("link", what, roles, nodes=[one, other], replaced=node.name)
            self._out.send(node, m.GivenUp())
            other = one if node.name == other else other
            self.node_lost(node, f"its link to {other} is broken", m.Fault.TRANSPORT)
        if isinstance(recovery.phase, Running) and (why or broken is not None):
            # Who was replaced, if anybody, has no role: others' connections broke, too.
            who = "all others" if broken is not None else "all nodes"
            reason = f"connections broke, and {who} reach each other ({why or 'roles wait in vain'})"
            recovery.fail(reason, [])
        recovery.reconsider()

    def _replaceable(self, broken: Broken) -> m.NodeName:
        """The end of a link that is replaced: rather that which was found than the other, and none that holds
        what nobody else does."""
        ends = sorted(broken.ends, key=lambda name: name != broken.replaced)  # INV-9 (links)
        pairs = zip(ends, reversed(ends), strict=True)
        able = (name for name, stays in pairs if not self._has_no_other(name, stays))
        return next((name for name in able if can_be_spared(self._cluster, name)), "")

    def _has_no_other(self, replaced: m.NodeName, stays: m.NodeName) -> bool:
        """Whether the job would wait for a node if that one were replaced: for one that reaches the other end
        of the link, as far as is known."""
        cluster = self._cluster
        if cluster.settings.policy == "stop" or replaced not in cluster.roles_by_node:
            return False
        if can_shrink(cluster, replaced):
            return False
        spares = cluster.nodes.keys() - cluster.roles_by_node.keys() - {replaced, stays, *cluster.draining}
        return all(frozenset((place(name), place(stays))) in self._severed for name in spares)
