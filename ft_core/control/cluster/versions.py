"""Which versions of the state there are or were, and which of them are right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ft_core.protocol.messages import Plan


@dataclass
class Versions:
    """The versions of one job, as far as this controller was told."""

    initial: int | None = None
    """The version that the script makes by itself; known once a role has reached training."""
    newest_seen: int = 0
    """The newest version that any role is known to have had."""
    verified: int | None = None
    """With `--ft-verify`, the newest version in which all who hold something alike are known to have the
    same: nothing newer is gone on from, as long as this is held. None: nothing was compared yet."""
    tainted: int | None = None
    """The oldest version of the epoch that is known to be wrong somewhere: neither it nor a newer one is gone
    on from in any case."""
    left: list[tuple[int, int]] = field(default_factory=list)
    """Epochs that began behind durable checkpoints of the job, each with the version that it began with;
    ascending."""
    ledger_through: int = 0
    """The newest step that the ledger of samples has."""

    def seen(self, versions: Iterable[int]) -> None:
        """Note versions that some role has, or had."""
        self.newest_seen = max([self.newest_seen, *versions])

    @property
    def trained(self) -> bool:
        """Whether a step was done: every role has had snapshots then, and copies of them are elsewhere."""
        return self.initial is not None and self.newest_seen > self.initial

    def taint(self, version: int) -> None:
        """This version of the epoch is wrong somewhere."""
        self.tainted = version if self.tainted is None else min(version, self.tainted)

    def leave(self, epoch: int, version: int) -> None:
        """Give up what is newer than this version, of earlier epochs, as the job does in this one."""
        self.left = [(before, back_to) for before, back_to in self.left if back_to < version]
        self.left.append((epoch, version))

    def epoch_begins(self, version: int | None) -> None:
        """All go on from this version, or from what their scripts begin with."""
        self.tainted = None
        if self.verified is not None:
            self.verified = version
        if version is not None:
            self.seen([version])

    def take(self, plan: Plan) -> None:
        """Take over what another controller knew."""
        self.initial, self.newest_seen = plan.initial_version, max(self.newest_seen, plan.newest_seen)
        self.left = plan.left

    def forget(self) -> None:
        """The job starts over."""
        self.initial, self.newest_seen = None, 0
        self.verified = self.tainted = None
