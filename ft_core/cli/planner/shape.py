"""What `ftctl plan` is told of a job: hosts, how a model lies on its roles, how roles keep its state.

The engine knows plain data parallelism. What a framework's flags say comes from its adapter, by the entry
point `ft_core.planner`, which names a `Framework`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from ft_core.errors import ConfigError
from ft_core.protocol.domains import SEPARATOR, domain_of
from ft_core.state.placement import WARDS, Places


@dataclass(frozen=True)
class Hosts:
    """Where the roles run. `replicas`: how many failure domains may be lost at once."""

    world_size: int
    nproc_per_node: int = 8
    nodes_per_domain: int = 1
    spares: int = 0
    replicas: int = 1
    ready: int = 0
    """Roles of each node that standbys have started ahead of need, on spares too."""

    @property
    def nodes(self) -> int:
        """Those that train."""
        return -(-self.world_size // self.nproc_per_node)

    @property
    def guarded(self) -> int:
        """Nodes of which a spare has the copies, and all roles started."""
        return min(self.nodes, WARDS * self.spares) if self.ready >= self.nproc_per_node else 0

    @cached_property
    def places(self) -> Places:
        """For whoever asks where copies go."""
        return Places(self.role_nodes, self.domains, self.spare_nodes, self.ready > 0)

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
        """Nodes fill racks in order; without those each is a domain."""
        nodes = enumerate([*dict.fromkeys(self.role_nodes.values()), *self.spare_nodes])
        each = self.nodes_per_domain
        return {node: f"rack{at // each}{SEPARATOR}{node}" for at, node in nodes} if each > 1 else {}

    @property
    def failure_domains(self) -> int:
        """How many there are, those of spares included."""
        return len({domain_of(n, self.domains) for n in [*self.role_nodes.values(), *self.spare_nodes]})


@dataclass(frozen=True)
class Tensor:
    """A group of like parameters on one role; each token is multiplied with `active` of them.

    Those of one `kind` have the same peers; the kind without a name is what every token meets.
    """

    name: str
    parameters: int
    active: int
    kind: str = ""


class Model(Protocol):
    """How a model lies on the roles of a job."""

    @property
    def stages(self) -> int:
        """How many kinds of roles there are: those of one stage have like tensors."""

    def stage(self, role: int) -> int:
        """That of a role; the order of ranks is the framework's."""

    def tensors(self, stage: int) -> list[Tensor]:
        """What each role of a stage has."""

    def peers(self, role: int, kind: str) -> Sequence[int]:
        """The roles with the same tensors of a kind in order, `role` included."""


@dataclass(frozen=True)
class DataParallel:
    """A model that every role has whole, as under torch's own data parallelism."""

    world_size: int
    parameters: int
    stages: int = 1

    def stage(self, role: int) -> int:
        """Without pipelines there is one stage, 0."""
        return 0

    def tensors(self, stage: int) -> list[Tensor]:
        """All parameters as one tensor: only its size counts."""
        return [Tensor("parameters", self.parameters, self.parameters)]

    def peers(self, role: int, kind: str) -> Sequence[int]:
        """All roles of the job."""
        return range(self.world_size)


def check_batch(sequences: int, ways: int) -> None:
    """Raise ConfigError unless the sequences of a step can be dealt to so many data-parallel roles, or groups
    of roles that share them."""
    if ways > 0 and sequences % ways:
        raise ConfigError(
            f"--global-batch-size {sequences} cannot be dealt {ways} ways, which is the data-parallel size: "
            "each has as many sequences as another"
        )


@dataclass(frozen=True)
class Storage:
    """In how many bytes per parameter a role keeps a model's state, and who has the same.

    `weights` are on all peers. `main` parameters and `optimizer` state are too, or `sharded`: over all peers,
    or over those of each of `instances` equal groups of them.
    """

    weights: int
    main: int
    optimizer: int
    sharded: bool = False
    instances: int = 1

    @classmethod
    def usual(cls, precision: str, optimizer: str) -> Storage:
        """Mixed precision keeps main parameters in fp32. Adam has two moments, SGD its momentum."""
        moments = 8 if optimizer == "adam" else 4
        return cls(4, 0, moments) if precision == "fp32" else cls(2, 4, moments)

    def shards(self, peers: int) -> int:
        """Into how many parts state is divided that so many peers have."""
        if peers % self.instances:
            raise ConfigError("the data-parallel size cannot be divided by the optimizer instances")
        return peers // self.instances if self.sharded else 1


@dataclass(frozen=True)
class PlannedJob:
    """All that determines what is unique, what is sent and what is survived."""

    hosts: Hosts
    model: Model
    storage: Storage
    tokens: int = 0
    """Tokens of a step, all roles together."""

    @property
    def data_parallel(self) -> int:
        """Over how many roles the tokens of a step are dealt."""
        return len(self.model.peers(0, ""))

    def holders(self, role: int, kind: str, sharded: bool) -> Sequence[int]:
        """Roles with the same tensors, or with the same shard of their state (one per instance)."""
        peers = self.model.peers(role, kind)
        if not sharded:
            return peers
        shards = self.storage.shards(len(peers))
        return peers[peers.index(role) % shards :: shards]


@dataclass(frozen=True)
class Framework:
    """What an adapter adds to `ftctl plan`: its flags, and what they say.

    `model` gives None where no flag describes one; `storage` is given the usual one, and gives None where
    nothing is different. Both raise ConfigError for flags that clash.
    """

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    storage: Callable[[argparse.Namespace, Storage], Storage | None]
    model: Callable[[argparse.Namespace], Model | None] = lambda args: None
