"""The flight records of simulated workers: what they do together, in one group of all roles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ft_core.process.doing import Doing, Seen
from ft_core.protocol.flight import FlightGroup, FlightLog, FlightRecord, Look
from ft_core.protocol.groups import GroupId

from .world import World

if TYPE_CHECKING:
    from .workers import SimWorker

_KEPT = 16
_KINDS = {"step": "all_reduce", "derive": "all_gather", "gather": "all_gather"}
"""What is done together, in an operation's terms; all else is a barrier."""
_START = 10**9
"""Of the clock: 0 is no time of an operation."""


class FlightRecorder:
    """Of all roles."""

    def __init__(self, world: World, roles: int) -> None:
        self._world = world
        self._group = FlightGroup(0, str(GroupId.of(range(roles), 0)))
        self._records: dict[int, tuple[int, list[FlightRecord]]] = {}
        """By pid: the epoch, and what was begun in it."""
        self._newest: dict[int, tuple[int, str, int]] = {}
        """By pid: what was begun last, as the workers call it."""

    @property
    def now(self) -> int:
        return _START + int(self._world.now * 1e9)

    def begins(self, worker: SimWorker, kind: str, number: int) -> None:
        """It comes to an exchange of that kind."""
        epoch, records = self._of(worker)
        newest = epoch, kind, number
        if self._newest.get(worker.pid) == newest:
            return
        self._newest[worker.pid] = newest
        count = records[-1].number + 1 if records else 0
        record = FlightRecord(0, count, _KINDS.get(kind, "barrier"), 4, "float32", -1, self.now, 0)
        self._records[worker.pid] = epoch, [*records, record][-_KEPT:]

    def ends(self, workers: Iterable[SimWorker]) -> None:
        """All have come."""
        for worker in workers:
            epoch, records = self._of(worker)
            done = [
                FlightRecord(
                    r.group, r.number, r.kind, r.nbytes, r.dtype, r.peer, r.started, r.ended or self.now
                )
                for r in records
            ]
            self._records[worker.pid] = epoch, done

    def _of(self, worker: SimWorker) -> tuple[int, list[FlightRecord]]:
        epoch, records = self._records.get(worker.pid, (0, []))
        return (epoch, records) if epoch == worker.epoch else (worker.epoch, [])

    def log(self, worker: SimWorker, role: int, wanted: int, closely: bool = False) -> FlightLog:
        """As an agent reads it, who has given it that role, for the epoch that is `wanted`. `closely`: with
        what it does."""
        epoch, records = self._of(worker)
        if (worker.role, epoch) != (role, wanted) and wanted >= 0:
            epoch, records = wanted, []
        state = "T" if worker.stopped else "R" if worker.hung else "S"
        at_end = worker.version >= worker.node.job.steps
        about = role, epoch, worker.version, self.now, state, at_end
        doing: Doing = "stopped" if worker.stopped else "file" if worker.reads else "runs"
        look = Look(Seen(worker.pid, "python", doing)) if closely else None
        return FlightLog(*about, (self._group,), tuple(records), look=look)
