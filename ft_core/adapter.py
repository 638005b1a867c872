"""What the engine asks of a training framework. An adapter answers these questions and nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ft_core.elastic.rules import Membership
from ft_core.protocol.messages import Dealt, Redundancy, ReplicaGroup

__all__ = ["Adapter", "Elastic", "Maker", "Redundancy", "ReplicaGroup", "State", "StateTensor"]


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a role's state after a step.

    All tensors with the same holders form a segment, which is copied, checked and sent as one.
    """

    name: str
    """Unique within the role, and the same on all holders."""
    tensor: torch.Tensor
    """A tensor of any shape and dtype, on the device or on the host. It is read after this call, while the
    next forward pass runs, and must not change before the optimizer's step."""
    holders: tuple[int, ...]
    """The roles that have the same content after every step, this one included, in ascending order. All of
    them list the same tensors with these holders, in the same order: any holder's copy serves any other. What
    is not in enough failure domains this way is copied to other nodes."""
    volatile: bool = False
    """Whether it may change before the optimizer's step (a running statistic, say): then it is copied at the
    end of the step, and not behind the next forward pass. Keep such tensors small."""


class State(Protocol):
    """What is snapshotted and restored together: a role's state, or what a peer has adopted of it."""

    def tensors(self) -> Iterable[StateTensor]:
        """The state after the step just finished, in an order that depends on the layout alone.

        What is there after the first step only (an optimizer's moments) may be missing before. Another set of
        tensors than a step before costs new memory.
        """

    def envelope(self) -> Any:
        """Small state that is no tensor of its own: random states, schedules, loss scaler, hyper-parameters.

        Plain data: numbers, strings, bytes, lists, tuples, dicts, small tensors and arrays. It is encoded as
        JSON at the end of each step, and every float comes back to the bit. Anything else raises TypeError
        there.
        """

    def envelope_holders(self) -> tuple[int, ...]:
        """Roles whose envelope would do for this role as well, this one included.

        An envelope with random states is the role's own wherever roles draw different numbers.
        """

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        """Put a snapshot back in place.

        `tensors`: by the names that `tensors` gave, views of host memory: copy, do not keep. Where the state
        has not changed since, they are its own tensors. A newcomer is given what its predecessor had, also
        where its own state has no such tensor yet; what a survivor has beside these came after that version,
        and is to be dropped. `envelope`: what `envelope` returned. What cannot be put
        back is an error to raise: it ends the job.
        """


@dataclass(frozen=True)
class Maker:
    """What makes versions of a state. It goes with them, since another job may read one from storage."""

    framework: str
    """Its name, as a user knows it."""
    release: str
    """The framework's version. Another one is said, and no error."""
    adapter: str
    """Which of the framework's adapters, that do not have the same in their envelopes."""
    format: int
    """Counts the ways in which this adapter has written what it can only read as it is written now."""

    def __str__(self) -> str:
        return f"{self.framework} {self.release} ({self.adapter}, format {self.format})"


class Elastic(Protocol):
    """What an adapter adds where replica groups may leave and come back (policy `shrink`).

    As it is here, all roles are one group, which waits for a node where one is lost.
    """

    replica_group: ReplicaGroup = ReplicaGroup(0, 1, Redundancy.SHARDED)
    """Which replica group this role belongs to, and what the others have of its state."""

    def adopt(self, roles: Sequence[int]) -> Mapping[int, State]:
        """Hold what these roles, which are away, had alone, beside this role's own state, and step it too.

        Called when an epoch begins, before anything is restored, with all roles that this one is to hold
        in it; others are let go. For each what has the holders that the role itself would have told, by the
        names that it would have given: it comes from its snapshots, and goes back to it. Shards are restored
        after this role's own state.
        """
        return {}

    def dealt_after(self, version: int, membership: Membership) -> Iterable[tuple[int, Dealt]]:
        """What each step after `version` trained, up to the version that the state is now, as
        `ft_core.elastic.rules.Deal.entries_after` has it. On one role of each group, with policy `shrink`."""
        return ()


@runtime_checkable
class Adapter(State, Elastic, Protocol):
    """Framework side of snapshot and restore.

    A class that names this one as its base must have `ring`, `reset` and what `State` has. The rest is as it
    is here for a framework that needs no more.
    """

    ring: tuple[int, ...]
    """The data-parallel peers of this role in order, itself included: where replicas go first (FFTrainer's
    neighbouring redundancy, section 4.2)."""

    @property
    def maker(self) -> Maker | None:
        """What is checked before a version is restored, of which the envelope is a dict then. None: nothing
        is."""
        return None

    def derive(self) -> None:
        """Make what a version leaves out because it follows from what all roles have restored: a collective.

        Called on every role that goes on with its script, in each epoch that goes on from a version, before
        anything else is done in it. The epoch may end in it; then it is called again in the next. What it
        reads it must not change. (FFTrainer, section 4.2, leaves out what peers have. What follows from that
        is left out, too.)
        """

    def reset(self) -> None:
        """Drop whatever an abandoned step left behind: gradients, pending handles, flags.

        Called on a role that lives through a failure, before its state is restored. The step may have been
        left anywhere. No collective may be issued here.
        """
