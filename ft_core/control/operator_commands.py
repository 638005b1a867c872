"""What people have done to the job through `ftctl` or its page: failures injected, strikes forgiven.

A drain takes longer, and is begun by `changeovers`; questions are answered by `observe.ctl`.
"""

from __future__ import annotations

from ft_core.control.changeovers import Changeovers
from ft_core.control.events import Peer, Send
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol.domains import place
from ft_core.protocol.messages import Denied, Forgiven, Inject, Injected, KillWorker, NodeName


class OperatorCommands:
    """Carries out what one controller is told to do at once."""

    def __init__(self, recovery: RecoveryCoordinator, changeovers: Changeovers) -> None:
        self._recovery, self._changeovers = recovery, changeovers
        self._cluster, self._out = recovery.cluster, recovery.out

    def on_inject(self, peer: Peer, asked: Inject) -> None:
        """Kill a role's worker, or a whole node."""
        cluster, role = self._cluster, asked.role
        node = cluster.nodes.get(cluster.places.get(role, "") if role is not None else asked.node or "")
        if node is None:
            victim = role if role is not None else asked.node
            self._out.emit(Send(peer, Denied(error=f"no such role or node: {victim}")))
            return
        self._out.record("injected", f"ftctl kill {f'node {node.name}' if role is None else f'role {role}'}")
        self._out.send(node, KillWorker(role=role))
        self._out.emit(Send(peer, Injected(killed=node.name if role is None else role)))

    def on_forgive(self, peer: Peer, node: NodeName) -> None:
        """Forget what counts against a node."""
        cluster, out, where = self._cluster, self._out, place(node)
        if where not in cluster.strikes.places() | {place(name) for name in cluster.nodes}:
            out.emit(Send(peer, Denied(error=f"no such node: {node}")))
            return
        count = cluster.strikes.forgive(where, out.now)
        out.record("forgiven", f"ftctl nodes forgive {where}: {count} strikes", node=where)
        out.emit(Send(peer, Forgiven(where, count)))
        self._recovery.strikes_changed = True
        self._changeovers.forgive(where)
