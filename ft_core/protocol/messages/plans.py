"""A plan: what the job is, and what of an epoch one agent and one worker must know."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta

from ft_core.protocol.checkpoint_names import Past
from ft_core.protocol.groups import parse, roles_in
from ft_core.protocol.messages.values import (
    BeganWith,
    Catalogue,
    Epoch,
    MembershipChanges,
    NodeAddress,
    NodeName,
    Number,
    Origin,
    PlanId,
    ReplicaGroups,
    Role,
    Roles,
    SegmentId,
    Value,
    Version,
    check_texts,
)

# -- plans ---------------------------------------------------------------------------------------------


class Counterparts(Value, frozen=True, array_like=True):
    """Roles that others stand for, see `control.decide.compact.counterparts`: by how much the numbers of
    those are greater, and of which roles."""

    shifts: tuple[tuple[Number, Roles], ...]

    def __post_init__(self) -> None:
        check_texts(roles_in, (roles for _, roles in self.shifts))

    def expanded(self) -> Mapping[Role, Role]:
        """Role -> who stands for it, by role."""
        return _expanded(self.shifts)


@lru_cache(maxsize=8)
def _expanded(shifts: tuple[tuple[int, str], ...]) -> Mapping[int, int]:
    pairs = ((role, role + by) for by, text in shifts for run in roles_in(text) for role in run)
    return MappingProxyType(dict(sorted(pairs)))


class EpochStart(Value, frozen=True):
    """What an epoch begins with, as everybody must know it who has a part in it."""

    epoch: Epoch
    store: str
    version: Version | None
    origin: Origin
    parts: list[Version]
    """The parts of the script that all roles have come to the end of: with which version."""
    restart_epoch: Epoch
    counterparts: Counterparts
    """Who stands for the roles that are away."""
    adopting: bool
    """Whether these hold what those had alone."""
    newcomers: list[Role]
    ledger_through: Version
    """The newest step that the ledger has."""
    every: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Steps from a version that is protected to the next, from the epoch's own on."""

    @property
    def absent(self) -> Mapping[Role, Role]:
        """Roles that are away, with their counterparts."""
        return self.counterparts.expanded()

    @property
    def adopted(self) -> Mapping[Role, Role]:
        """The absent roles whose counterparts hold what they had alone."""
        return self.absent if self.adopting else {}


class WorkerPlan(EpochStart, frozen=True):
    """What one role must know of the epoch it takes part in. Its agent makes it, with the settings of now."""

    completed: dict[str, tuple[Number, Role]]
    """Start-up operations that somebody who takes part has on record: how many, and who."""
    membership: MembershipChanges
    policy: str
    lr_intervention: str
    snapshot: str
    began_with: BeganWith
    verify: bool = False
    surrogates: Counterparts = Counterparts(())
    """For roles that start while others train: those that come back, and those that move, which train
    themselves, elsewhere."""

    def __post_init__(self) -> None:
        check_texts(parse, self.completed)

    @property
    def ahead(self) -> Mapping[Role, Role]:
        """Roles that start while others train, with those who stand for them."""
        return self.surrogates.expanded()

    @property
    def detached(self) -> bool:
        """Whether this is for a standby, which starts a role ahead of need that another worker of its node
        plays: it takes no part in the epoch, so it has no store, and meets nobody."""
        return not self.store


class JobState(EpochStart, frozen=True):
    """What a successor of the controller needs to go on, but for who is where: agents keep it. That of what
    roles are to do, it does not have: where some have not begun the epoch, there is another."""

    id: PlanId
    job: str
    master: str
    durable: str
    """Name of the durable checkpoint to read, if any."""
    script_resumes: bool
    groups: ReplicaGroups
    catalogue: Catalogue
    initial_version: Version | None
    newest_seen: Version
    attempts_without_progress: Number
    progress_mark: Version
    escalation_level: Number
    furthest_step: Version
    started_from: tuple[Version | None, Origin]
    """Version and origin that the job began with."""
    begun_from: str
    """Name of another job's durable checkpoint that it began with, if any."""
    left: list[tuple[Epoch, Version]]
    """Epochs that began behind durable checkpoints of the job, each with the version that it began with."""

    @property
    def past(self) -> Past:
        """The past whose durable checkpoints are of use."""
        return Past(self.job, self.begun_from, self.left)

    @property
    def state(self) -> JobState:
        """What of the plan every agent keeps for a successor of the controller."""
        return JobState(**{name: getattr(self, name) for name in JobState.__struct_fields__})


class Plan(JobState, frozen=True):
    """The control plane's truth: an epoch."""

    roles: dict[Role, NodeName]
    nodes: dict[NodeName, NodeAddress]
    sources: dict[Role, dict[SegmentId, list[NodeName]]]
    """Who holds what roles go on from that do not have all of it on their own node."""
    completed: dict[str, tuple[Number, Role]]
    """As of `WorkerPlan`."""


class NodePlan(Plan, frozen=True):
    """What one agent knows of it: `SharedPlan` and `OwnPlan` put together. `sources`: for the roles played
    and adopted on this node alone, and not for those whose snapshot is here. `completed`: for the groups of
    which a role here has not all on record."""

    away: dict[Role, list[SegmentId]]
    """For the roles in `absent` whose counterparts are on this node: all of their segments, by the catalogue.
    A durable checkpoint has their parts too."""
