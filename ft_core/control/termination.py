"""SIGTERM, to the job or to one of its nodes: what ends because of it is not replaced."""

from __future__ import annotations

from ft_core.control.cluster.node import Node
from ft_core.control.node_failures import NodeFailures
from ft_core.control.phases import Forming, Quiescing, Rebuilding, Waiting
from ft_core.control.prestart.notices import OTHERS
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.process.sigterm import ENDED, GRACE
from ft_core.protocol.messages import Fault, NodeName, Shutdown

SIGNAL_LAG = 0.02
"""Seconds in which the controller's process notices a signal that it was sent before a message."""


class Termination:
    """What is known of the signal: who was told to end, who has, and until when the others may."""

    def __init__(self, recovery: RecoveryCoordinator, failures: NodeFailures) -> None:
        self._recovery, self._failures = recovery, failures
        self._cluster, self._out = recovery.cluster, recovery.out
        self._job_told = False
        """Whether this controller was told, and not single nodes alone."""
        self._told: set[NodeName] = set()
        """Nodes that were told; if that is all that there are, the job was."""
        self._to_dismiss: set[NodeName] = set()
        """Nodes that were told to end and that nobody needs, which have yet to hear that they may."""
        self._left: list[tuple[NodeName, float]] = []
        """Nodes that have said so a moment ago, and when: this process may read its signal after that
        (`SIGNAL_LAG`)."""
        self._gone: set[NodeName] = set()
        """Nodes whose workers have ended of it, as the job's end was wanted: what they hold is there until
        they hear that they may end."""
        self._ends: tuple[float, str] | None = None
        """When the job ends at the latest, and what is said then; None: no node's workers have ended."""
        self._joined_at = 0.0
        """When a node came last."""

    def on_signal(self) -> None:
        """This process got SIGTERM. `ftrun` has it from outside, and passes it on to the agents as well."""
        self._recovery.leaving = self._job_told = True
        if isinstance(self._recovery.phase, Forming):
            self._recovery.end_job(ENDED, "it was told to end (SIGTERM) before it had begun")

    def on_node_joined(self) -> None:
        """A node has come: there is one that goes on, until it says that it was told to end as well."""
        self._recovery.leaving, self._joined_at = self._job_told, self._out.now

    def on_node_told(self, node: Node) -> None:
        """A node says that it was told to end."""
        name = node.name
        if name not in self._told:
            self._out.record("leaving", f"node {name} was told to end (SIGTERM)", node=name)
        self._told = {*(self._told & self._cluster.nodes.keys()), name}
        if not isinstance(self._recovery.phase, Rebuilding):  # or others are yet to be heard of
            self.look_whether_all_leave()
        self._to_dismiss |= {name} - self._cluster.roles_by_node.keys()
        self._dismiss()

    def on_node_left(self, node: Node) -> None:
        """All workers of a node have died of it. Where `ftrun` has told all, this process was first, but may
        read the signal afterwards."""
        node.liveness.leaves = True
        self._left.append((node.name, self._out.now))

    def look_whether_all_leave(self) -> None:
        """The job was told to end if all nodes were."""
        cluster = self._cluster
        self._recovery.leaving |= bool(cluster.roles_by_node) and self._told == cluster.nodes.keys()

    def tick(self) -> None:
        """Let those go that may, and end what has had its time."""
        now = self._out.now
        self._dismiss()
        due = [name for name, at in self._left if now - at > SIGNAL_LAG]
        self._left = [(name, at) for name, at in self._left if now - at <= SIGNAL_LAG]
        for name in due:
            self._node_left(name)
        if self._recovery.leaving:
            if self._ends is not None and now > self._ends[0]:
                self._recovery.end_job(ENDED, self._ends[1])
        elif self._gone and now > self._joined_at + OTHERS:
            gone, self._gone, self._ends = sorted(self._gone), set(), None
            for name in gone:  # the job goes on, and they are lost to it
                self._node_left(name)

    def let_go(self) -> None:
        """Where those who are left have to recover first, nodes without workers are in the way: they are told
        to end, and the others recover without them."""
        if not self._gone or not isinstance(self._recovery.phase, Quiescing | Waiting):
            return
        for name in sorted(self._gone):
            if (node := self._cluster.nodes.get(name)) is not None:
                self._out.send(node, Shutdown(code=ENDED))
                self._cluster.drop(node)
                self._out.close(node)
        self._gone.clear()

    def _dismiss(self) -> None:
        """Nodes that were told to end, and that nobody needs, may; once nobody may obey another any more."""
        if not self._to_dismiss or self._out.now < self._recovery.settled or self._recovery.leaving:
            return
        cluster = self._cluster
        names, self._to_dismiss = sorted(self._to_dismiss - cluster.roles_by_node.keys()), set()
        for name in names:
            if (node := cluster.nodes.get(name)) is not None:
                self._out.send(node, Shutdown(code=ENDED))

    def _node_left(self, name: NodeName) -> None:
        cluster, recovery = self._cluster, self._recovery
        if (node := cluster.nodes.get(name)) is None:
            return  # its connection has broken since, and that was enough
        if not recovery.leaving:
            self._out.send(node, Shutdown(code=ENDED))
            self._failures.node_lost(node, "it was told to end (SIGTERM)", Fault.TERMINATED)
            return
        self._gone.add(name)
        if self._gone >= cluster.nodes.keys() & cluster.roles_by_node.keys():
            recovery.end_job(ENDED, "it was told to end (SIGTERM)")
        if self._ends is None:
            reason = f"it was told to end (SIGTERM); some workers handle that, but not those of {name}"
            self._ends = self._out.now + GRACE, reason
