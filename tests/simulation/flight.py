"""The flight records of simulated workers: the exchange of each step, in one group of all roles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ft_core.protocol.flight import FlightGroup, FlightLog, FlightRecord
from ft_core.protocol.groups import GroupId

from .world import World

if TYPE_CHECKING:
    from .workers import SimWorker

_KEPT = 16
_START = 10**9
"""Of the clock: 0 is no time of an operation."""


class FlightRecorder:
    """Of all roles."""

    def __init__(self, world: World, roles: int) -> None:
        self._world = world
        self._group = FlightGroup(0, str(GroupId.of(range(roles), 0)))
        self._records: dict[int, tuple[int, list[FlightRecord]]] = {}
        """By pid: the epoch, and what was begun in it."""

    @property
    def now(self) -> int:
        return _START + int(self._world.now * 1e9)

    def begins(self, worker: SimWorker, number: int) -> None:
        """It comes to the exchange of a step."""
        epoch, records = self._of(worker)
        if not records or records[-1].number != number:
            records.append(FlightRecord(0, number, "all_reduce", 4, "float32", -1, self.now, 0))
            del records[:-_KEPT]
        self._records[worker.pid] = epoch, records

    def ends(self, workers: Iterable[SimWorker], number: int) -> None:
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

    def log(self, worker: SimWorker) -> FlightLog:
        """As an agent reads it."""
        assert worker.role is not None
        epoch, records = self._of(worker)
        state = "T" if worker.stopped else "R" if worker.hung else "S"
        at_end = worker.version >= worker.node.job.steps
        about = worker.role, epoch, worker.version, self.now, state, at_end
        return FlightLog(*about, (self._group,), tuple(records))
