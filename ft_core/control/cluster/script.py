"""The user's script: what it has begun with, begins with once more, and which of its parts are over."""

from __future__ import annotations

from dataclasses import dataclass, field

from ft_core.protocol.messages import Origin, Plan


@dataclass
class Script:
    """The script of one job."""

    resumes: bool = False
    """Whether it goes on from a checkpoint of its own, started again."""
    start_version: int = 0
    """The version that it is known to begin with, started again."""
    started_from: tuple[int | None, Origin] = (None, "initial")
    """Version and origin that the job began with."""
    begun_from: str = ""
    """The name of another job's durable checkpoint that it began with, if it did."""
    begun_here: bool = False
    """Whether this controller has made its first plan, of all that anybody knows."""
    restart_epoch: int = 0
    """The newest epoch in which all scripts were started again."""
    parts: list[int] = field(default_factory=list)
    """Its parts that every role has come to the end of: with which version."""

    def take(self, plan: Plan) -> None:
        """Take over what another controller knew."""
        self.parts = plan.parts
        self.resumes |= plan.script_resumes
        self.restart_epoch, self.started_from = plan.restart_epoch, plan.started_from
        self.begun_from = plan.begun_from

    def forget(self, epoch: int) -> None:
        """The job starts over, in this epoch."""
        self.start_version, self.parts = 0, []
        self.restart_epoch, self.started_from = epoch, (None, "initial")
