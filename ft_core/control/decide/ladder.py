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
"""The height at which all have begun anew from memory: what is above are restarts."""


@dataclass(frozen=True)
class Against:
    """What to go on in place does not help against. It becomes the reason for the job's end on the last rung,
    with `code` as `ftrun`'s exit code, and with what belongs to the reason."""

    reason: str
    roles: tuple[Role, ...] = ()
    """That have failed."""
    code: int = 1
    traceback: str = ""
    """For the last event, from its line break on."""
    short: str = ""
    """The same for the console."""
    fault: Fault | None = None
    """The class of the failure."""
    node: NodeName = ""
    """Where that was."""

    @property
    def about(self) -> dict[str, Any]:
        """Fields of the event that tells of the failure."""
        return {} if self.fault is None else {"fault": self.fault, "node": self.node}

    @property
    def recorded(self) -> str:
        """For the job's last event."""
        return self.reason + self.traceback

    @property
    def said(self) -> str:
        """For the console."""
        return self.reason + self.short


@dataclass(frozen=True)
class Climb:
    """What is tried next. `height`: what of the ladder is behind the job then, see `next_rung`."""

    rung: Rung
    height: int
    roles: frozenset[Role] = frozenset()
    """Whose workers are replaced, where that is not all."""
    own: bool = False
    """Whether durable checkpoints are of no use: scripts that went on from one did not come to it again, or
    have gone on to train something else."""

    @property
    def restarts(self) -> int:
        """How many times in a row all scripts have been started again by then."""
        return _restarts(self.height)

    def takes(self, role: Role) -> bool:
        """Whether the worker of that role is replaced."""
        return self.rung is not Rung.SOME or role in self.roles


def next_rung(
    height: int, limit: int, *, apart: frozenset[Role], memory: bool, diverged: bool, own: bool = False
) -> Climb | None:
    """The lowest rung that is left; None: the job ends.

    `height`: 0 at first and after progress, 1 once some have begun anew, 2 once all have, 2 + *n* after *n*
    restarts. `limit`: of those; 0: nothing but going on in place is wanted. `apart`: roles of which it is
    proven that they cannot go on with each other. `memory`: whether there may be state in it that all can
    begin with. `diverged`: whether it is of scripts that do not do again what they did. `own`: whether
    durable checkpoints are of something that the scripts have left behind.
    """
    if not limit:
        return None
    if memory and apart and height < 1:
        return Climb(Rung.SOME, 1, apart)
    if memory and height < ALL_FROM_MEMORY:
        return Climb(Rung.ALL, ALL_FROM_MEMORY)
    above = max(height, ALL_FROM_MEMORY) + 1
    if above > ALL_FROM_MEMORY + limit:
        return None
    return Climb(Rung.RESTART, above, own=own or (diverged and height > ALL_FROM_MEMORY))


def _restarts(height: int) -> int:
    return max(0, height - ALL_FROM_MEMORY)


def in_words(height: int) -> str:
    """What was tried before the job ends, to begin the reason with."""
    restarts = _restarts(height)
    return f"after {restarts} restart{'s' * (restarts > 1)} in a row without a new step: " if restarts else ""
