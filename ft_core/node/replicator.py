"""Sends the unique part of each snapshot to the ring, TRAIN before STATE, and keeps the count.

FFTrainer, sections 4.2 (neighbouring redundancy) and 5.3 (training traffic goes first).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ft_core.errors import TransportError
from ft_core.net.transport import TcpTransport
from ft_core.process.inject import Injector
from ft_core.state.placement import replica_nodes, sender, spares_of
from ft_core.state.store import NodeStore

_DEADLINE = 600.0
_GATE_SHARE = 0.2
"""Share of a step that the gate may hold a snapshot back; beyond it, STATE is sent all the same."""
_GATE_POLL = 2e-4


class _Where(NamedTuple):
    """Where everybody is in an epoch."""

    epoch: int
    role_nodes: dict[int, str]
    adopters: dict[int, int]
    domains: dict[str, str]
    addresses: dict[str, str]


class Replicator:
    """One per agent. `replicate` is called in a thread per role and version."""

    def __init__(self, store: NodeStore, transport: TcpTransport, replicas: int, injector: Injector) -> None:
        self._store, self._transport = store, transport
        self.replicas = replicas
        """k; the script may bring another before its first snapshot."""
        self._injector = injector
        self._lock = threading.Lock()
        self._rings: dict[int, list[int]] = {}
        self._sent: dict[int, tuple[int, int]] = {}
        self._seconds = 0.0
        self._where = _Where(0, {}, {}, {}, {})

    def begin(self, plan: dict[str, Any]) -> None:
        """A new epoch, or other spares than before: learn where everybody is."""
        self._where = _Where(
            plan["epoch"],
            {int(role): node for role, node in plan["roles"].items()},
            {int(role): int(adopter) for role, adopter in plan["adopted"].items()},
            {node: about["domain"] for node, about in plan["nodes"].items()},
            {node: about["data"] for node, about in plan["nodes"].items()},
        )

    def cancel(self) -> None:
        """An epoch ended: wake every transfer under way."""
        self._transport.close_peers()

    def register(self, role: int, ring: list[int]) -> None:
        """Remember a role's DP peers, the first choice for its replicas."""
        self._rings[role] = ring

    def replicate(self, role: int, version: int, epoch: int, gate: Callable[[], None]) -> None:
        """Make every segment of the snapshot of a role, played or adopted here, survive k failure domains.

        Returns when each copy is acknowledged as verified. Raises TransportError.
        """
        of_epoch, role_nodes, adopters, domains, addresses = self._where
        if of_epoch != epoch:
            raise TransportError(f"epoch {epoch} is over")
        adopter = adopters.get(role)
        found = self._store.memory(role, adopted=adopter is not None).find(version)
        if found is None:
            raise TransportError(f"version {version} of role {role} is no longer in memory")
        _, buffer = found
        total, started = 0, time.monotonic()
        ring = self._rings.get(role)
        if adopter is not None:
            # What it had alone is where its adopter is.
            role_nodes, ring = {**role_nodes, role: role_nodes[adopter]}, self._rings.get(adopter)
        spares = spares_of(addresses, role_nodes)
        for index, segment in enumerate(buffer.segments):
            if sender(segment, role_nodes) != role:
                continue
            for node in replica_nodes(segment, role_nodes, domains, self.replicas, ring, spares):
                self._injector.point(role, "h2h", version)
                sums = list(buffer.checksums(index))
                total += self._transport.push(
                    addresses[node],
                    segment,
                    version,
                    buffer.data(index),
                    sums,
                    epoch=epoch,
                    gate=gate,
                    deadline=_DEADLINE,
                )
        with self._lock:
            sent, snapshots = self._sent.get(role, (0, 0))
            self._sent[role] = (sent + total, snapshots + 1)
            self._seconds += time.monotonic() - started if total else 0.0

    def sent(self, role: int) -> tuple[int, int]:
        """Payload bytes sent for a role since the start, and for how many snapshots."""
        with self._lock:
            return self._sent.get(role, (0, 0))

    def bandwidth(self) -> float:
        """Bytes per second of all sending so far, waiting for training traffic included; 0 before any."""
        with self._lock:
            return sum(total for total, _ in self._sent.values()) / self._seconds if self._seconds else 0.0

    @staticmethod
    def gate(busy: Callable[[], bool], step_ns: int) -> Callable[[], None]:
        """A gate between chunks: closed while training traffic is in flight, for a bounded time in all."""
        left = _GATE_SHARE * step_ns / 1e9

        def wait() -> None:
            nonlocal left
            while left > 0 and busy():
                time.sleep(_GATE_POLL)
                left -= _GATE_POLL

        return wait
