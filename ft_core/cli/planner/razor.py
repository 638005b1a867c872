"""What state of a job is unique and what is redundant, and what its replication costs and buys.

FFTrainer's checkpoint razor (section 4.2), once from the segments of a live role (`summarise`), once from a
job's flags without running it (`plan`). Sizes are in bytes, times in seconds, rates in bytes or operations
per second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ft_core.errors import ConfigError
from ft_core.state.manifest import Segment
from ft_core.state.placement import domain_of, replica_nodes, sender, survives


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
    segments: Iterable[Segment],
    role_nodes: Mapping[int, str],
    domains: Mapping[str, str],
    replicas: int,
    role: int,
    ring: Sequence[int] | None = None,
    spares: Sequence[str] = (),
) -> list[TensorRow]:
    """The tensors of `role`, largest first. `domains` counts copies that replication adds, too."""
    rows = []
    for segment in segments:
        nodes = replica_nodes(segment, role_nodes, domains, replicas, ring, spares)
        copies = survives(segment, role_nodes, domains, nodes) + 1
        sent = tuple(nodes) if sender(segment, role_nodes) == role else ()
        held = len(segment.holders)
        rows += [
            TensorRow(i.name, i.dtype, i.shape, i.nbytes, held, segment.holders == (role,), copies, sent)
            for i in segment.items
        ]
    return sorted(rows, key=lambda row: (-row.nbytes, row.tensor))


@dataclass(frozen=True)
class Job:
    """The flags that determine a job's state, named as Megatron-LM's. Raises ConfigError if they clash."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    world_size: int
    nproc_per_node: int = 8
    nodes_per_domain: int = 1
    ffn_hidden_size: int = 0
    kv_channels: int = 0
    num_query_groups: int = 0
    swiglu: bool = False
    bias: bool = True
    rmsnorm: bool = False
    learned_positions: bool = True
    untied: bool = False
    num_experts: int = 0
    topk: int = 1
    moe_ffn_hidden_size: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    distributed_optimizer: bool = False
    instances: int = 1
    zero_stage: int = 0
    precision: str = "fp32"
    optimizer: str = "adam"
    replicas: int = 1
    spares: int = 0
    global_batch_size: int = 0

    def __post_init__(self) -> None:
        for name, value in {
            "--world-size": self.world_size % (self.tp * self.pp),
            "--world-size (expert groups)": self.world_size % (self.expert_tp * self.ep * self.pp),
            "--num-layers": self.num_layers % self.pp,
            "--num-attention-heads": self.num_attention_heads % self.tp,
            "--num-experts": self.num_experts % self.ep,
        }.items():
            if value:
                raise ConfigError(f"{name} cannot be divided by the parallel sizes given")
        if self.zero_stage and (self.distributed_optimizer or self.instances > 1):
            raise ConfigError("--zero-stage is DeepSpeed's, --use-distributed-optimizer Megatron's: give one")
        if self.instances > 1 and not self.distributed_optimizer:
            raise ConfigError("several optimizer instances need --use-distributed-optimizer")
        if self.dp % self.instances or (self.num_experts and self.edp % self.instances):
            raise ConfigError("the data-parallel size cannot be divided by the optimizer instances")

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.etp or self.tp

    @property
    def dp(self) -> int:
        """Ranks that hold the same parameters. Context-parallel ranks are among them."""
        return self.world_size // (self.tp * self.pp)

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def sharded(self) -> bool:
        """Whether optimizer state is sharded over data-parallel ranks."""
        return self.distributed_optimizer or self.zero_stage > 0

    @property
    def weight_bytes(self) -> int:
        """Per parameter. ZeRO-3's parts of them follow from the main parameters, and are not kept."""
        if self.zero_stage == 3:
            return 0
        return 4 if self.precision == "fp32" else 2

    @property
    def main_bytes(self) -> int:
        """Per parameter. In fp32 they are views (Megatron) or copies (DeepSpeed) of whole parameters."""
        return 4 if self.precision != "fp32" or self.zero_stage == 3 else 0

    @property
    def optimizer_bytes(self) -> int:
        """Per parameter: Adam's two moments, SGD's momentum."""
        return 8 if self.optimizer == "adam" else 4

    @cached_property
    def role_nodes(self) -> dict[int, str]:
        """Roles fill nodes in order."""
        return {r: f"node{r // self.nproc_per_node}" for r in range(self.world_size)}

    @cached_property
    def spare_nodes(self) -> list[str]:
        """They come after the others."""
        first = len(set(self.role_nodes.values()))
        return [f"node{first + number}" for number in range(self.spares)]

    @cached_property
    def domains(self) -> dict[str, str]:
        """Nodes fill failure domains in order."""
        nodes = enumerate([*dict.fromkeys(self.role_nodes.values()), *self.spare_nodes])
        return (
            {n: f"domain{i // self.nodes_per_domain}" for i, n in nodes} if self.nodes_per_domain > 1 else {}
        )

    def peers(self, role: int, expert: bool) -> list[int]:
        """Roles with the same (expert) parameters, `role` included; Megatron's order tp-cp-ep-dp-pp."""
        stride, size = (self.expert_tp * self.ep, self.edp) if expert else (self.tp, self.dp)
        block = stride * size
        first = role // block * block + role % stride
        return list(range(first, first + block, stride))

    def holders(self, role: int, expert: bool, sharded: bool) -> tuple[int, ...]:
        """Roles with the same parameters, or with the same shard of their state (one per instance)."""
        peers = self.peers(role, expert)
        shards = len(peers) // self.instances
        return tuple(peers[peers.index(role) % shards :: shards] if sharded else peers)


@dataclass(frozen=True)
class Tensor:
    """A group of like parameters on one rank; each token is multiplied with `active` of them."""

    name: str
    parameters: int
    active: int
    expert: bool = False


def tensors(job: Job, stage: int) -> list[Tensor]:
    """Parameters of one rank of pipeline stage `stage`, as Megatron's GPT model has them."""
    h, bias, norm = job.hidden_size, int(job.bias), job.hidden_size * (1 if job.rmsnorm else 2)
    layers, first, last = job.num_layers // job.pp, stage == 0, stage == job.pp - 1
    channels = job.kv_channels or h // job.num_attention_heads
    query = channels * job.num_attention_heads
    qkv = query + 2 * channels * (job.num_query_groups or job.num_attention_heads)
    vocab = -(-job.vocab_size // (128 * job.tp)) * 128

    def mlp(ffn: int, tp: int) -> int:
        up = 2 * ffn if job.swiglu else ffn
        return (up * (h + bias) + ffn * h) // tp + bias * h

    found: list[Tensor] = []

    def add(name: str, parameters: int, active: int | None = None, expert: bool = False) -> None:
        if parameters:
            found.append(Tensor(name, parameters, parameters if active is None else active, expert))

    if first:
        tied = last and not job.untied
        add("word embeddings", vocab * h, vocab * h if tied else 0)
        add("position embeddings", job.seq_length * h * job.learned_positions, 0)
    add("attention", layers * ((qkv * (h + bias) + query * h) // job.tp + bias * h))
    ffn = job.ffn_hidden_size or 4 * h
    if job.num_experts:
        one = mlp(job.moe_ffn_hidden_size or ffn, job.expert_tp)
        add("router", layers * h * job.num_experts)
        add("experts", layers * job.num_experts // job.ep * one, layers * job.topk * one, expert=True)
    else:
        add("mlp", layers * mlp(ffn, job.tp))
    add("norms", layers * 2 * norm + (norm if last else 0))
    if last and (job.untied or not first):
        add("output layer", vocab * h)
    return found


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
        """All of its state."""
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
    received_per_node: int
    snapshots_per_rank: int
    memory_per_node: int
    copies: Mapping[int, int]
    same_domain: int
    compute_params: int
    tokens: float

    @property
    def nbytes(self) -> int:
        """State of the rank."""
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
        """Sending the busiest rank's replicas at `bandwidth` bytes per second per device."""
        return self.sent_per_rank / bandwidth

    def free_checkpointing_ratio(self, step_seconds: float, bandwidth: float) -> float:
        """FFTrainer's equations 1 and 2: at 1 or above, replication hides behind the step.

        With bytes sent = 12 phi / D (mixed precision, Adam, k = 1) and the step at its computing time, it
        is D B S V / (2 F).
        """
        transfer = self.transfer_seconds(bandwidth)
        return step_seconds / transfer if transfer else math.inf


def plan(job: Job) -> Plan:
    """Work out the state, its placement and its traffic, for all ranks."""
    parts: list[dict[tuple[bool, bool], int]] = []  # per stage: (expert, sharded) -> bytes on a rank
    groups = []
    for stage in range(job.pp):
        groups.append(tensors(job, stage))
        sizes: Counter[tuple[bool, bool]] = Counter()
        for tensor in groups[stage]:
            for sharded, nbytes in _split(job, tensor).items():
                sizes[tensor.expert, sharded] += nbytes
        parts.append(dict(sizes))

    sent: Counter[int] = Counter()
    received: Counter[str] = Counter()
    copies: Counter[int] = Counter()
    same_domain = 0
    per_stage = job.tp * job.dp
    for role in range(job.world_size):
        for (expert, sharded), nbytes in parts[role // per_stage].items():
            holders = job.holders(role, expert, sharded)
            if role != holders[0]:
                continue
            segment = Segment(holders, ())
            ring = job.peers(role, expert)
            nodes = replica_nodes(segment, job.role_nodes, job.domains, job.replicas, ring, job.spare_nodes)
            sent[role] += nbytes * len(nodes)
            received.update(dict.fromkeys(nodes, nbytes))
            copies[survives(segment, job.role_nodes, job.domains, nodes) + 1] += 1
            if len(holders) > 1 and nodes:
                same_domain += 1

    totals = [sum(sizes.values()) for sizes in parts]
    memory: Counter[str] = Counter()
    for role, node in job.role_nodes.items():
        memory[node] += 2 * totals[role // per_stage]
    for node, nbytes in received.items():
        memory[node] += 2 * nbytes
    heaviest = max(range(job.pp), key=lambda s: totals[s])
    return Plan(
        stage=heaviest,
        rows=tuple(_row(job, tensor, heaviest * per_stage) for tensor in groups[heaviest]),
        sent_per_rank=max(sent.values()),
        received_per_node=max(received.values(), default=0),
        snapshots_per_rank=2 * max(totals),
        memory_per_node=max(memory.values()),
        copies=dict(sorted(copies.items())),
        same_domain=same_domain,
        compute_params=max(sum(t.active for t in found) for found in groups),
        tokens=job.global_batch_size * job.seq_length / job.dp,
    )


def _split(job: Job, tensor: Tensor) -> dict[bool, int]:
    """Bytes of a tensor's state on one rank: False -> held by all data-parallel peers, True -> sharded."""
    shards = (job.edp if tensor.expert else job.dp) // job.instances
    state = tensor.parameters * (job.main_bytes + job.optimizer_bytes)
    weights = tensor.parameters * job.weight_bytes
    if not job.sharded:
        return {False: weights + state}
    if job.zero_stage == 3:
        return {True: -(-state // shards)}
    return {False: weights, True: -(-state // shards)}


def _row(job: Job, tensor: Tensor, role: int) -> PlanRow:
    shards = (job.edp if tensor.expert else job.dp) // job.instances
    share = shards if job.sharded else 1
    main = -(-tensor.parameters * job.main_bytes // share)
    optimizer = -(-tensor.parameters * job.optimizer_bytes // share)
    weights = tensor.parameters * job.weight_bytes
    alone = len(job.holders(role, tensor.expert, sharded=False)) == 1
    alone_shard = len(job.holders(role, tensor.expert, sharded=job.sharded)) == 1
    unique = weights * alone + (main + optimizer) * alone_shard
    return PlanRow(tensor.name, tensor.parameters, weights, main, optimizer, unique)


def failure_domains(job: Job) -> int:
    """How many there are."""
    return len({domain_of(n, job.domains) for n in [*job.role_nodes.values(), *job.spare_nodes]})
