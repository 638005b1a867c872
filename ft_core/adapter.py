"""What the engine asks of a training framework. An adapter answers these questions and nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ft_core.protocol.messages import Redundancy, ReplicaGroup

__all__ = ["Adapter", "Redundancy", "ReplicaGroup", "State", "StateTensor"]


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a role's state after a step.

    `holders` are the roles that have the same content (this one included). A `volatile` tensor may
    change before the optimizer step (a running statistic, say), so it is copied at the step boundary
    and not behind the next forward pass. Keep volatile tensors small.
    """

    name: str
    tensor: torch.Tensor
    holders: tuple[int, ...]
    volatile: bool = False


class State(Protocol):
    """What is snapshotted and restored together: a role's state, or what a peer has adopted of it."""

    def tensors(self) -> Iterable[StateTensor]:
        """The state after the step just finished, in an order that depends on the layout alone."""

    def envelope(self) -> Any:
        """Small state that is no tensor of its own: RNG, schedules, loss scaler, hyper-parameters."""

    def envelope_holders(self) -> tuple[int, ...]:
        """Roles whose envelope would do for this role as well."""

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        """Put a snapshot back in place. `tensors` are views of host memory: copy, do not keep."""


class Adapter(State, Protocol):
    """Framework side of snapshot and restore."""

    ring: tuple[int, ...]
    """The DP peers of this role in order, itself included: where replicas go first."""

    replica_group: ReplicaGroup
    """Which replica group this role belongs to, and what the others have of its state."""

    def adopt(self, roles: Sequence[int]) -> Mapping[int, State]:
        """Hold what these roles, which are away, had alone, beside this role's own state, and step it too.

        Called when an epoch begins, before anything is restored, with all roles that this one is to hold
        in it; others are let go. For each what has the holders that the role itself would have told, by the
        names that it would have given: it comes from its snapshots, and goes back to it. Shards are restored
        after this role's own state.
        """

    def reset(self) -> None:
        """Drop whatever an abandoned step left behind: gradients, pending handles, flags."""
