"""What may follow the end of an epoch: the values that a decision chooses from."""

from __future__ import annotations

from dataclasses import dataclass, field

from ft_core.control.decide.groups import Places
from ft_core.protocol.messages import Origin

Sources = dict[int, dict[str, list[str]]]
"""Role -> segment -> the nodes to ask for it, the best first."""


@dataclass(frozen=True)
class AwaitStandby:
    """A worker that crashed on a healthy node is restarted there; its standby is about to be up."""


@dataclass(frozen=True)
class ListCheckpoints:
    """The decision depends on the durable checkpoints that these nodes can read."""

    nodes: frozenset[str]


@dataclass(frozen=True)
class NotEnoughWorkers:
    """There is no worker for these roles; `reason`: why the job cannot go on without them.

    `release_workers_of`: roles whose workers are to be ended, so that their nodes can fill the holes.
    """

    roles: list[int]
    reason: str = ""
    release_workers_of: Places = field(default_factory=dict)


@dataclass(frozen=True)
class NextEpoch:
    """The next epoch: places, and what to go on from. `newcomers`: roles that begin with another worker."""

    roles: Places
    version: int | None
    origin: Origin
    sources: Sources
    newcomers: list[int]
    durable: str = ""
    """Name of the durable checkpoint, if it is one."""


@dataclass(frozen=True)
class RestartScripts:
    """Memory does not suffice, but the script, started again, goes on from a checkpoint of its own.

    `still_alive`: workers that have to be ended before.
    """

    reason: str
    roles: Places
    lost: list[int]

    @property
    def still_alive(self) -> Places:
        """Role -> node of the roles that live."""
        return {role: node for role, node in sorted(self.roles.items()) if role not in self.lost}


@dataclass(frozen=True)
class NoStateLeft:
    """Nothing helps. `unrecoverable`: for want of a version that every role could have."""

    reason: str
    unrecoverable: bool = False


Outcome = AwaitStandby | ListCheckpoints | NotEnoughWorkers | NextEpoch | RestartScripts | NoStateLeft
