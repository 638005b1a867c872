"""SIGTERM to a node: its workers get it too, and what they make of it decides what becomes of the node.

A script that handles the signal (Megatron's `--exit-signal-handler`) saves and ends by itself, and a failure
on the way is recovered as ever. Workers that do not handle it die of it, as under torchrun, and their node
leaves the job.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable

from ft_core.node.events import Effect, Signal
from ft_core.node.workers.worker_table import Worker
from ft_core.process.sigterm import GRACE


class Termination:
    """What has become of the signal so far."""

    def __init__(self) -> None:
        self.under_way = False
        self.leave_at = math.inf
        """When the node leaves, whoever is still there."""
        self.stays = False
        """Whether all is said, and it only waits for the controller's word to end."""
        self._first: set[int] = set()
        """Workers that had a role when the signal came."""
        self._signalled: set[int] = set()

    def begin(self, playing: Iterable[Worker]) -> None:
        """The signal has come, for the first time."""
        self.under_way = True
        self._first = {worker.number for worker in playing}

    def pass_on(self, playing: Iterable[Worker]) -> list[Effect]:
        """Again and again, for those who were not ready for it.

        A worker that has just been given its role ignores the signal still, and the successor of a failed
        one must not die of what its predecessor has survived, before its script is where it handles it.
        """
        left = [worker.number for worker in playing if worker.number not in self._signalled]
        return [Signal(number, even_so=number in self._first) for number in left if self.under_way]

    def stay(self, until: float) -> None:
        """Its workers have ended, or have had their time; what they did is in memory, and may be written."""
        self.stays, self.leave_at = True, until + GRACE

    def passed_on(self, worker: int) -> None:
        """That worker has got the signal."""
        self._signalled.add(worker)

    def explains(self, code: int) -> bool:
        """Whether a worker has ended, with this code, because it was told to."""
        return self.under_way and code == -signal.SIGTERM
