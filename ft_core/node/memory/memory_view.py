"""What the agent reports of its node, read from the memory that its shell keeps: a
`node.memory.view.View`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ft_core.node.devices.xids import Xids
from ft_core.node.memory.replicator import Replicator
from ft_core.node.memory.view import Words
from ft_core.node.workers import standby_budget as room
from ft_core.node.workers.own_time import OwnTimes
from ft_core.node.workers.processes import WorkerPool
from ft_core.state.manifest import Segment
from ft_core.state.memory import TORN, Word, loss_of
from ft_core.state.store import NodeStore


class MemoryView:
    """Reads it at each call."""

    def __init__(self, store: NodeStore, pool: WorkerPool, replicator: Replicator, xids: Xids) -> None:
        self._store, self._pool, self._replicator = store, pool, replicator
        self._own_times, self._xids = OwnTimes(), xids

    def words(self, worker: int) -> Words:
        if (control := self._pool.control(worker)) is None:
            self._own_times.forget(worker)
            return Words(TORN, TORN, 0.0, 0.0)  # its end is about to be handled
        seconds = control[Word.STEP_NS] / 1e9, control[Word.WAITED_NS] / 1e9
        own = self._own_times.of(worker, control)
        progress, loss = (control[Word.VERSION], control[Word.TAG]), loss_of(control[Word.LOSS])
        return Words(*progress, *seconds, *own, loss, control[Word.PASSED])

    def roles(self, adopted: bool) -> Collection[int]:
        return list(self._store.adopted if adopted else self._store.roles)

    def versions(self, role: int, adopted: bool = False) -> list[int]:
        return self._store.memory(role, adopted).versions()

    def segments(self, role: int, adopted: bool = False) -> Sequence[Segment]:
        return self._store.memory(role, adopted).segments()

    def replicas(self) -> dict[str, list[int]]:
        return self._store.replicas.versions()

    def holders(self, segment: str) -> Sequence[int]:
        found = self._store.replicas.segment(segment)
        return found.holders if found else ()

    def sent(self, role: int) -> tuple[int, int]:
        return self._replicator.sent(role)

    def bandwidth(self) -> float:
        return self._replicator.bandwidth()

    def room(self, workers: Collection[int], agents: int) -> int:
        return room.like([pid for w in workers if (pid := self._pool.pid(w)) is not None], agents)

    def gpus(self) -> bool:
        return room.gpus()

    def device_memory(self, worker: int) -> tuple[int, int]:
        if (control := self._pool.control(worker)) is None:
            return 0, 0
        return control[Word.DEVICE_FREE], control[Word.DEVICE_MEMORY]

    def xids(self) -> dict[int, int]:
        return self._xids.counts()
