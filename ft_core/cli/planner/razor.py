"""What state of a job is unique and what is redundant, and what its replication costs and buys.

FFTrainer's checkpoint razor (section 4.2), once from the segments of a live role (`summarise`), once from a
job's shape without running it (`plan`). Sizes are in bytes, times in seconds, rates in bytes or operations
per second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ft_core.cli.planner.shape import PlannedJob, Tensor
from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, Ring, replica_nodes, sender, survives


@dataclass(frozen=True)
class TensorRow:
    """A tensor of a live role: who else holds it, and which nodes `role` sends copies to."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    holders: int
    unique: bool
    domains: int
    sent_to: tuple[str, ...]


def summarise(
    segments: Iterable[Segment], places: Places, replicas: int, role: int, ring: Ring | None = None
) -> list[TensorRow]:
    """The tensors of `role`, largest first. `TensorRow.domains` counts copies that replication adds, too."""
    rows = []
    for segment in segments:
        nodes = replica_nodes(segment, places, replicas, ring)
        copies = survives(segment, places.role_nodes, places.domains, nodes) + 1
        sent = tuple(nodes) if sender(segment, places.role_nodes) == role else ()
        held = len(segment.holders)
        rows += [
            TensorRow(i.name, i.dtype, i.shape, i.nbytes, held, segment.holders == (role,), copies, sent)
            for i in segment.items
        ]
    return sorted(rows, key=lambda row: (-row.nbytes, row.tensor))


@dataclass(frozen=True)
class PlanRow:
    """State of one tensor group on one rank. `unique`: bytes that no other rank holds."""

    tensor: str
    parameters: int
    weights: int
    main: int
    optimizer: int
    unique: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its state: parameters, main copies, optimizer."""
        return self.weights + self.main + self.optimizer


@dataclass(frozen=True)
class Plan:
    """What protecting a job costs and buys. Per rank: the heaviest one; per node: the heaviest one.

    `copies`: number of domains -> how many distinct segments end up in that many, replicas included.
    `compute_params`: parameters that each token meets on the busiest rank. `tokens`: per rank and step.
    """

    stage: int
    rows: tuple[PlanRow, ...]
    sent_per_rank: int
    sent_per_node: int
    received_per_node: int
    state_per_node: int
    snapshots_per_rank: int
    memory_per_node: int
    copies: Mapping[int, int]
    same_domain: int
    compute_params: int
    tokens: float

    @property
    def nbytes(self) -> int:
        """Bytes of all state of the rank."""
        return sum(row.nbytes for row in self.rows)

    @property
    def unique(self) -> int:
        """Bytes of it that exist on no other rank."""
        return sum(row.unique for row in self.rows)

    @property
    def survives(self) -> int:
        """How many failure domains may be lost at once, whichever they are."""
        return min(self.copies) - 1

    def compute_seconds(self, flops: float) -> float:
        """Forward and backward at `flops` sustained per device: 6 phi B S / F (FFTrainer, section 2)."""
        return 6 * self.compute_params * self.tokens / flops

    def transfer_seconds(self, bandwidth: float) -> float:
        """Sending the busiest node's replicas at `bandwidth` bytes per second, which its roles share."""
        return max(self.sent_per_node, self.received_per_node) / bandwidth

    def free_checkpointing_ratio(self, step_seconds: float, bandwidth: float) -> float:
        """FFTrainer's equations 1 and 2: at 1 or above, replication hides behind the step.

        With one device a node, bytes sent = 12 phi / D (mixed precision, Adam, k = 1) and the step at its
        computing time, it is D B S V / (2 F).
        """
        transfer = self.transfer_seconds(bandwidth)
        return step_seconds / transfer if transfer else math.inf


def plan(job: PlannedJob) -> Plan:
    """Work out the state, its placement and its traffic, for all ranks. Raises ConfigError for a clash."""
    hosts, model = job.hosts, job.model
    parts: list[dict[tuple[str, bool], int]] = []  # per stage: (kind, sharded) -> bytes on a rank
    groups = [model.tensors(stage) for stage in range(model.stages)]
    of_stage = [model.stage(role) for role in range(hosts.world_size)]
    for stage, found in enumerate(groups):
        sizes: Counter[tuple[str, bool]] = Counter()
        for tensor in found:
            for sharded, nbytes in _split(job, tensor, of_stage.index(stage)).items():
                sizes[tensor.kind, sharded] += nbytes
        parts.append(dict(sizes))

    sent: Counter[int] = Counter()
    received: Counter[str] = Counter()
    copies: Counter[int] = Counter()
    same_domain = 0
    places = hosts.places
    rings: dict[tuple[str, int], Ring] = {}  # by the first of the peers
    for role, stage in enumerate(of_stage):
        for (kind, sharded), nbytes in parts[stage].items():
            holders = job.holders(role, kind, sharded)
            if role != holders[0]:
                continue
            segment = Segment(tuple(holders), ())
            peers = model.peers(role, kind)
            if (ring := rings.get((kind, peers[0]))) is None:
                ring = rings[kind, peers[0]] = places.ring(peers)
            nodes = replica_nodes(segment, places, hosts.replicas, ring)
            sent[role] += nbytes * len(nodes)
            received.update(dict.fromkeys(nodes, nbytes))
            copies[survives(segment, hosts.role_nodes, hosts.domains, nodes) + 1] += 1
            if len(holders) > 1 and nodes:
                same_domain += 1

    totals = [sum(sizes.values()) for sizes in parts]
    state: Counter[str] = Counter()
    sent_by_node: Counter[str] = Counter()
    for role, node in hosts.role_nodes.items():
        state[node] += totals[of_stage[role]]
        sent_by_node[node] += sent[role]
    memory = Counter({node: 2 * nbytes for node, nbytes in state.items()})
    for node in hosts.spare_nodes:  # which has room for what may come to it from the start
        memory[node] += 2 * max(state.values())
    for node, nbytes in received.items():
        memory[node] += 2 * nbytes
    heaviest = max(range(model.stages), key=lambda s: totals[s])
    return Plan(
        stage=heaviest,
        rows=tuple(_row(job, tensor, of_stage.index(heaviest)) for tensor in groups[heaviest]),
        sent_per_rank=max(sent.values()),
        sent_per_node=max(sent_by_node.values()),
        received_per_node=max(received.values(), default=0),
        state_per_node=max(state.values()),
        snapshots_per_rank=2 * max(totals),
        memory_per_node=max(memory.values()),
        copies=dict(sorted(copies.items())),
        same_domain=same_domain,
        compute_params=max(sum(t.active for t in found) for found in groups),
        tokens=job.tokens / job.data_parallel,
    )


def _split(job: PlannedJob, tensor: Tensor, role: int) -> dict[bool, int]:
    """Bytes of a tensor's state on one rank: False -> held by all data-parallel peers, True -> sharded."""
    storage = job.storage
    state = tensor.parameters * (storage.main + storage.optimizer)
    weights = tensor.parameters * storage.weights
    if not storage.sharded:
        return {False: weights + state}
    share = {True: -(-state // storage.shards(len(job.model.peers(role, tensor.kind))))}
    return {False: weights, **share} if storage.weights else share


def _row(job: PlannedJob, tensor: Tensor, role: int) -> PlanRow:
    storage = job.storage
    share = storage.shards(len(job.model.peers(role, tensor.kind)))
    main = -(-tensor.parameters * storage.main // share)
    optimizer = -(-tensor.parameters * storage.optimizer // share)
    weights = tensor.parameters * storage.weights
    alone = len(job.holders(role, tensor.kind, sharded=False)) == 1
    alone_shard = len(job.holders(role, tensor.kind, sharded=storage.sharded)) == 1
    unique = weights * alone + (main + optimizer) * alone_shard
    return PlanRow(tensor.name, tensor.parameters, weights, main, optimizer, unique)
