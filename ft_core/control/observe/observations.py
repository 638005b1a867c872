"""What the machine tells its observer, beside the records that it emits: no shell hears of it, no decision is
made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ft_core.control.observe.goodput import Found
from ft_core.protocol.goodput import Cause
from ft_core.protocol.messages import Epoch, Fault, Heartbeat, NodeName, RoleBeat, Version


@dataclass(frozen=True)
class TimeGoes:
    """The job's time goes to `cause` from now on (None: as before), in that `epoch`, if it was decided on.
    `between_steps`: all roles had finished a step and done nothing since, so no work is cut off."""

    cause: Cause | None = None
    epoch: Epoch | None = None
    between_steps: bool = False


@dataclass(frozen=True)
class FirstSign:
    """Something may have failed at that time."""

    since: float


@dataclass(frozen=True)
class TakenOver:
    """A controller goes on in an epoch of another, in which time goes to `restoring` until all have their
    state."""

    found: Found
    restoring: Cause


@dataclass(frozen=True)
class AllRestored:
    """All roles have their state. `share`: the share of the replica groups that takes part."""

    epoch: Epoch
    version: Version
    share: float


@dataclass(frozen=True)
class StepDone:
    """A role has done so many steps, in the epoch under way."""

    version: Version


@dataclass(frozen=True)
class AllStepped:
    """All roles have done a step in the epoch under way; the last one so many by now."""

    version: Version


@dataclass(frozen=True)
class NodeBeat:
    """A node has said how it is."""

    node: NodeName
    before: Mapping[int, RoleBeat]
    """What it had said of its roles before."""
    beat: Heartbeat
    taking_part: Mapping[int, RoleBeat]
    """Roles that take part in the epoch under way, if it is in that."""
    newest: Version


@dataclass(frozen=True)
class ScriptsDone:
    """All have come to their end."""


@dataclass(frozen=True)
class FailureCounted:
    """Something has failed, for the first time that it is said."""

    fault: Fault
    place: str
    domain: str


@dataclass(frozen=True)
class PartWritten:
    """A role's part of a durable checkpoint is on storage; `whole`: and with it all are."""

    seconds: float
    whole: bool


Observation = (
    TimeGoes | FirstSign | TakenOver | AllRestored | StepDone | AllStepped | NodeBeat | ScriptsDone
    | FailureCounted | PartWritten
)  # fmt: skip
