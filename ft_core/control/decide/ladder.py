"""What is tried, one rung after the other, before a job ends. Pure.

In place first: who has failed is replaced, and survivors keep everything. Where that does not help, some
begin anew, or all do, from the newest state that is in memory; nothing is lost by either, so each is tried
once. Then all scripts are started again from storage, `--max-restarts` times: from the newest durable
checkpoint, or else as the script begins, with a checkpoint of its own if it has one. A step that nobody had
ever done starts the count again. A job is so never worse off than under `torchrun --max-restarts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ft_core.protocol.messages import Fault, NodeName, Role


class Rung(StrEnum):
    """Who begins anew, and from what."""

    SOME = "some"
    """Roles that do other things than their peers, from memory."""
    ALL = "all"
    """All roles, from memory."""
    RESTART = "restart"
    """All roles, from storage."""


ALL_FROM_MEMORY = 2
"""The level at which all have begun anew from memory: above it are restarts."""


@dataclass(frozen=True)
class Failure:
    """What has failed. Should the job end of it, then with `code` as `ftrun`'s exit code."""

    reason: str
    roles: tuple[Role, ...] = ()
    """The roles that have failed."""
    code: int = 1
    fault: Fault | None = None
    """The class of the failure."""
    node: NodeName = ""
    """The node on which it failed."""

    @property
    def about(self) -> dict[str, Any]:
        """Fields of the event that tells of the failure."""
        return {} if self.fault is None else {"fault": self.fault, "node": self.node}


@dataclass(frozen=True)
class EscalationCause(Failure):
    """A failure after which going on in place does not help; on the last rung, why the job ends."""

    traceback: str = ""
    """The traceback for the job's last event, from the line break before it on."""
    short: str = ""
    """The error in short for the console, from the line break before it on."""

    @property
    def recorded(self) -> str:
        """The reason for the last event of the job."""
        return self.reason + self.traceback

    @property
    def said(self) -> str:
        """The reason for the console."""
        return self.reason + self.short


@dataclass(frozen=True)
class Escalation:
    """The rung that is tried next. `level`: how far up the ladder the job is then, as `next_rung` has it."""

    rung: Rung
    level: int
    roles: frozenset[Role] = frozenset()
    """The roles whose workers are replaced, where that is not all."""
    skip_durable: bool = False
    """Whether durable checkpoints are of no use: scripts that went on from one did not come to it again, or
    have gone on to train something else."""

    @property
    def restarts(self) -> int:
        """How many times in a row all scripts have been started again by then."""
        return _restarts(self.level)

    def replaces(self, role: Role) -> bool:
        """Whether the worker of that role is replaced."""
        return self.rung is not Rung.SOME or role in self.roles


def next_rung(
    level: int,
    limit: int,
    *,
    incompatible: frozenset[Role],
    memory: bool,
    diverged: bool,
    skip_durable: bool = False,
) -> Escalation | None:
    """The lowest rung that is left; None: the job ends.

    `level`: 0 at first and after progress, 1 once some have begun anew, 2 once all have, 2 + *n* after *n*
    restarts. `limit`: the most restarts; 0: only going on in place is wanted. `incompatible`: roles that are
    proven to be unable to go on with each other. `memory`: whether all can begin with state that is in it.
    `diverged`: whether the scripts do not do again what they did. `skip_durable`: whether durable checkpoints
    are of something that the scripts have left behind.
    """
    if not limit:
        return None
    if memory and incompatible and level < 1:
        return Escalation(Rung.SOME, 1, incompatible)
    if memory and level < ALL_FROM_MEMORY:
        return Escalation(Rung.ALL, ALL_FROM_MEMORY)
    above = max(level, ALL_FROM_MEMORY) + 1
    if above > ALL_FROM_MEMORY + limit:
        return None
    in_vain = diverged and level > ALL_FROM_MEMORY
    return Escalation(Rung.RESTART, above, skip_durable=skip_durable or in_vain)


def _restarts(level: int) -> int:
    return max(0, level - ALL_FROM_MEMORY)


def in_words(level: int) -> str:
    """What was tried before the job ends, to begin the reason with."""
    restarts = _restarts(level)
    return f"after {restarts} restart{'s' * (restarts > 1)} in a row without a new step: " if restarts else ""
