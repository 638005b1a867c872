"""SIGTERM to a node: first the controller is asked whether the job goes on without it. If so the node is
drained. Else its workers get the signal too, and what they make of it decides what becomes of the node.

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

ANSWER = 5.0
"""Seconds that the controller has to say whether the node is drained."""


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
        self._held_until = -math.inf
        """The time until which no worker gets the signal."""
        self._signalled: set[int] = set()

    def begin(self, playing: Iterable[Worker], held_until: float) -> None:
        """The signal has come, for the first time. `held_until`: when the workers get it, unless the
        controller says something."""
        self.under_way, self._held_until = True, held_until
        self._first = {worker.number for worker in playing}

    def answered(self, drained: bool) -> None:
        """The controller has said whether the node's roles go elsewhere."""
        self._held_until = math.inf if drained else -math.inf

    def pass_on(self, playing: Iterable[Worker], now: float) -> list[Effect]:
        """Pass the signal on, again and again for those who were not ready for it.

        A worker that has just been given its role ignores the signal still, and the successor of a failed
        one must not die of what its predecessor has survived, before its script is where it handles it.
        """
        if not self.under_way or now < self._held_until:
            return []
        left = [worker.number for worker in playing if worker.number not in self._signalled]
        return [Signal(number, even_so=number in self._first) for number in left]

    def stay(self, until: float) -> None:
        """Stay without workers, which have ended or have had their time; what they did is in memory, and may
        be written."""
        self.stays, self.leave_at = True, until + GRACE

    def passed_on(self, worker: int) -> None:
        """Note that a worker has got the signal."""
        self._signalled.add(worker)

    def explains(self, code: int) -> bool:
        """Whether a worker has ended, with this code, because it was told to."""
        return self.under_way and code == -signal.SIGTERM
