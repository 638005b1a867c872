"""Sends the unique part of each snapshot to the ring, TRAIN before STATE, and keeps the count.

FFTrainer, sections 4.2 (neighbouring redundancy) and 5.3 (training traffic goes first).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ft_core.errors import TransportError
from ft_core.net.gate import Gates, Turn
from ft_core.net.transport import TcpTransport
from ft_core.process.inject import Injector
from ft_core.protocol.messages import NodePlan
from ft_core.settings import Settings
from ft_core.state.placement import Places, replica_nodes, sender, spares_of
from ft_core.state.store import NodeStore

_DEADLINE = 600.0


class Replicator:
    """One per agent. `replicate` is called in a thread per role and version."""

    def __init__(self, store: NodeStore, transport: TcpTransport, injector: Injector) -> None:
        self._store, self._transport = store, transport
        self._gates = Gates(lambda: transport.sent_bytes)
        self._replicas, self._guarded = 0, False
        self._injector = injector
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[int, int]] = {}
        self._measured, self._seconds = 0, 0.0
        self._plan: NodePlan | None = None
        self._known: tuple[NodePlan, bool, Places] | None = None
        """Where all are, as of a plan, with spares that guard or not."""

    def use(self, settings: Settings) -> None:
        """How many copies there are, and whether spares keep them first. The script may bring others before
        its first snapshot."""
        self._replicas, self._guarded = settings.replicas, settings.guarded

    def begin(self, plan: NodePlan) -> None:
        """A new epoch, or other spares than before: learn where everybody is."""
        known = self._plan.nodes.values() if self._plan else ()
        self._plan = plan
        for gone in {where.data for where in known} - {where.data for where in plan.nodes.values()}:
            self._transport.close_peers(gone)  # what is being sent there goes elsewhere
        self._gates.begin()

    def cancel(self) -> None:
        """An epoch ended: wake every transfer under way."""
        self._transport.close_peers()

    def turn(self, role: int, step: float, busy: Callable[[], bool]) -> Turn:
        """The sending turn that `replicate` needs. `step`: seconds of the role's last one; `busy`: whether
        operations are in flight on this node."""
        return self._gates.turn(role, step, busy)

    def replicate(self, role: int, version: int, epoch: int, ring: Sequence[int], turn: Turn) -> None:
        """Make every segment of the snapshot of a role, played or adopted here, survive k failure domains.

        `ring`: DP peers of whoever holds it, the first choice. Returns when each copy is acknowledged as
        verified. Raises TransportError.
        """
        plan = self._plan
        if plan is None or plan.epoch != epoch:
            raise TransportError(f"epoch {epoch} is over")
        adopter = plan.adopted.get(role)
        found = self._store.memory(role, adopted=adopter is not None).find(version)
        if found is None:
            raise TransportError(f"version {version} of role {role} is no longer in memory")
        _, buffer = found
        total, started = 0, time.monotonic()
        roles = plan.roles
        if adopter is not None:  # what it had alone is where its adopter is
            roles = {**roles, role: roles[adopter]}
        places = self._places_of(plan, roles)
        peers = places.ring(ring)
        for index, segment in enumerate(buffer.segments):
            if sender(segment, roles) != role:
                continue
            for node in replica_nodes(segment, places, self._replicas, peers):
                self._injector.point(role, "h2h", version)
                sums, address = list(buffer.checksums(index)), plan.nodes[node].data
                total += self._transport.push(
                    address,
                    segment,
                    version,
                    buffer.data(index),
                    sums,
                    epoch=epoch,
                    gate=self._gates.to(address, turn),
                    deadline=_DEADLINE,
                )
        self._gates.sent(role, turn)
        with self._lock:
            sent, snapshots = self._sent.get(role, (0, 0))
            self._sent[role] = (sent + total, snapshots + 1)
            if total and turn.measures:
                self._measured += total
                self._seconds += time.monotonic() - started

    def _places_of(self, plan: NodePlan, roles: Mapping[int, str]) -> Places:
        """Worked out once for all snapshots of a plan; of a role that was adopted, each time."""
        known, guarded, own = self._known, self._guarded, roles is plan.roles
        if own and known is not None and known[0] is plan and known[1] is guarded:
            return known[2]
        domains = {node: where.domain for node, where in plan.nodes.items()}
        places = Places(roles, domains, spares_of(plan.nodes, roles), guarded)
        if own:
            self._known = plan, guarded, places
        return places

    def sent(self, role: int) -> tuple[int, int]:
        """Payload bytes sent for a role since the start, and for how many snapshots."""
        with self._lock:
            return self._sent.get(role, (0, 0))

    def bandwidth(self) -> float:
        """Bytes per second of what was sent without a gate so far; 0 before any."""
        with self._lock:
            return self._measured / self._seconds if self._seconds else 0.0
