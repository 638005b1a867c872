"""Having snapshots safe: on other nodes, which the commit word tells the worker, and then on storage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ft_core.node.events import (
    DurableDone,
    Effect,
    Replicate,
    Replicated,
    ToController,
    WriteDurable,
)
from ft_core.node.workers.worker_table import NONE, Worker
from ft_core.protocol import messages as m
from ft_core.settings import Settings

log = logging.getLogger(__name__)


_SAY_AGAIN = 20
"""Failures of one copy after which the controller is told again."""


@dataclass
class _Copying:
    """One snapshot on its way."""

    worker: Worker
    since: float
    failures: int = 0
    again: float | None = None
    """When it is tried again; None while it is being tried."""


_IN_VAIN = 3
"""Times that it waits for so long, in one epoch."""
COMPARING = 5.0
"""Seconds that a version which is safe waits for the word that its holders have the same: training does not
stand for a controller that is held up."""


class Copies:
    """The copies of all snapshots of this epoch, and what is being written."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._copying: dict[Replicate, _Copying] = {}
        self._writing: dict[int, tuple[m.Version, float]] = {}
        """Role -> the version of it that is being written to storage, and since when."""
        self.alike = NONE
        """The newest version in which, as the controller has said, all holders have the same."""
        self._late = 0
        """How many times in a row nobody has said so in time."""
        self._comparing: dict[int, tuple[Worker, m.Version, float]] = {}
        """Worker -> the version that waits to be compared, and since when."""

    def epoch_ends(self) -> None:
        """What is not safe by now is of a past that may be done again."""
        self._copying.clear()
        self._comparing.clear()

    def epoch_begins(self, version: m.Version) -> None:
        """All go on from that version."""
        self.epoch_ends()
        self.alike, self._late = version, 0

    def staged(self, worker: Worker, role: int, version: m.Version, epoch: int, now: float) -> list[Effect]:
        """A snapshot is whole, of the role that `worker` plays, or of one that it has adopted."""
        order = Replicate(worker.number, role, version, epoch, tuple(worker.ring))
        self._copying[order] = _Copying(worker, now)
        return [order]

    def tick(self, now: float) -> list[Effect]:
        """Try again what has failed."""
        due = [order for order, c in self._copying.items() if c.again is not None and c.again <= now]
        for order in due:
            self._copying[order].again = None
        return list(due)

    def failed(self, event: Replicated, now: float, pause: float) -> list[Effect]:
        """Try again later what could not be replicated. The receiver is lost, as a rule, and the end of the
        epoch on its way."""
        order, copying = event.order, self._copying.get(event.order)
        if copying is None:
            return []
        copying.failures += 1
        copying.again = now + pause
        if copying.failures % _SAY_AGAIN == 1:  # to another controller, perhaps
            return [ToController(m.Suspect(order.epoch, order.role, event.failed))]
        if copying.failures == 2:
            log.warning(
                "node %s: role %d, version %d is not replicated yet, training waits, and it is tried "
                "again: %s",
                *(self._node, order.role, order.version, event.failed),
            )
        return []

    def safe(
        self, event: Replicated, adopted: Callable[[int], list[int]], now: float
    ) -> tuple[Worker, m.Version] | None:
        """A snapshot has arrived wherever it must be: whose it is, and the version that is safe, which goes
        by the oldest of what the worker holds. `adopted`: the roles that one has adopted."""
        order, copying = event.order, self._copying.pop(event.order, None)
        if copying is None or not copying.worker.plays:
            return None
        worker = copying.worker
        worker.copy_s = now - copying.since
        # INV-4 (nothing lost): no step is done before the version that it begins with is in enough places.
        worker.replicated[order.role] = max(worker.replicated.get(order.role, NONE), order.version)
        return worker, min(worker.replicated.get(role, NONE) for role in [worker.role, *adopted(worker.role)])

    # -- what holders have alike ---------------------------------------------------------------

    def is_compared(self, worker: Worker, version: m.Version, now: float) -> bool:
        """Whether that version of what `worker` holds is found alike, or need not be. If not it waits."""
        if version not in worker.sums or version <= self.alike or self._late >= _IN_VAIN:
            return True
        self._comparing[worker.number] = worker, version, now
        return False

    def verified(self, version: m.Version) -> list[tuple[Worker, m.Version]]:
        """All holders have the same in that version. Returns the workers that have waited for it, with their
        versions."""
        self.alike, self._late = max(self.alike, version), 0
        return self._go_on(lambda waits, _: waits <= version)

    def not_compared(self, now: float) -> list[tuple[Worker, m.Version]]:
        """Versions that wait no longer, since nobody may be there who compares."""
        late = self._go_on(lambda _, since: now >= since + COMPARING)
        self._late += bool(late)
        for worker, version in late:
            log.warning(
                "node %s: role %d, version %d: not compared with the other holders' within %g s, and gone "
                "on from",
                *(self._node, worker.role, version, COMPARING),
            )
        if late and self._late == _IN_VAIN:
            log.warning(
                "node %s: nobody has compared what it holds with others', %d times in a row: in this epoch "
                "nothing waits for that until somebody does (has every node --ft-verify?)",
                *(self._node, _IN_VAIN),
            )
        return late

    def _go_on(self, which: Callable[[m.Version, float], bool]) -> list[tuple[Worker, m.Version]]:
        found = {n: (w, v) for n, (w, v, since) in self._comparing.items() if which(v, since)}
        for number in found:
            del self._comparing[number]
        return [(worker, version) for worker, version in found.values() if worker.plays]

    # -- storage -------------------------------------------------------------------------------

    def write(
        self, worker: Worker, version: m.Version, plan: m.NodePlan, settings: Settings, now: float
    ) -> list[Effect]:
        """A role's version is safe: write it, if it is one of those that are to be written."""
        interval, role = settings.durable_interval, worker.role
        if not interval or version % interval >= settings.period(plan.every):
            return []  # nor was any step before it, down to the version before this one
        if (plan.origin, plan.version) == ("durable", version):
            return []  # it is there
        if (earlier := self._writing.get(role)) is not None:  # each is one more copy of the state in memory
            reason = f"that of step {earlier[0]} is still being written: storage is slower than the interval"
            return [ToController(m.DurableFailed(role, version, reason))]
        self._writing[role] = version, now
        return [WriteDurable(role, version, plan, worker.state_is_replicated)]

    def written(self, event: DurableDone, now: float) -> list[Effect]:
        """A durable checkpoint is written, or could not be."""
        _, began = self._writing.pop(event.role)
        if not event.failed:
            written = [(role, event.epoch, event.version, now - began) for role in event.roles]
            return [ToController(m.DurableWritten(*each)) for each in written]
        # A failed save must not end training: the in-memory copies are what protects it.
        log.error(
            "node %s: durable checkpoint of step %d, role %d: %s",
            *(self._node, event.version, event.role, event.failed),
        )
        return [ToController(m.DurableFailed(event.role, event.version, event.failed))]
