"""What an agent reads of its node, to report it: memory that the shell keeps, words that workers write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from ft_core.state.manifest import Segment


class Words(NamedTuple):
    """What a worker itself has written into its control block; see `state.memory.Word`."""

    version: int
    tag: int
    step_s: float
    waited_s: float
    own_s: float = 0.0
    """Seconds of a step that it computes, see `node.workers.own_time`."""
    data_s: float = 0.0
    """And that it waits for its data."""
    loss: float | None = None
    passed: int = 0


class View(Protocol):
    """Read only. A node's copies are named by role, `adopted` or not, and those it keeps for others by
    segment."""

    def words(self, worker: int) -> Words:
        """How far a worker that plays a role has come."""

    def roles(self, adopted: bool) -> Collection[int]:
        """Roles of which there is memory here."""

    def versions(self, role: int, adopted: bool = False) -> list[int]:
        """Complete snapshots of a role, oldest first."""

    def segments(self, role: int, adopted: bool = False) -> Sequence[Segment]:
        """The layout of the newest of them."""

    def replicas(self) -> dict[str, list[int]]:
        """Segment -> the versions of it that are kept for others, ascending."""

    def holders(self, segment: str) -> Sequence[int]:
        """The holders of a segment that is kept for others; empty if it is just gone."""

    def sent(self, role: int) -> tuple[int, int]:
        """Payload bytes that were sent for a role, and for how many snapshots."""

    def bandwidth(self) -> float:
        """Bytes per second of all sending so far; 0 before any."""

    def room(self, workers: Collection[int], agents: int) -> int:
        """How many more workers like these this machine clearly has memory for, where so many agents each
        take so much: see `node.workers.standby_budget`."""

    def gpus(self) -> bool:
        """Whether this machine has any."""

    def device_memory(self, worker: int) -> tuple[int, int]:
        """Bytes of its GPU that were free when it had started its role ahead of need, and all of them; (0, 0)
        where it has none."""

    def xids(self) -> dict[int, int]:
        """Errors of its GPUs, by number."""
