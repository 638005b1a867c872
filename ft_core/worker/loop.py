"""What a training loop of its own sees of fault tolerance, whatever its framework: which step is next, and
what of it was logged before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ft_core.worker.session import Session


class Loop:
    """A loop that is entered again from its top after a recovery, so that it keeps no progress of its own."""

    def __init__(self, session: Session | None) -> None:
        """`session` is None without fault tolerance: then the loop runs as if this were not there."""
        self._session = session
        self._step = 0
        self._newest = 0
        self._repeated = self._entered = False
        self._doubtful = -1
        """The newest step whose line another worker may have written."""
        self.inherited: Any = None
        """What `step_done` was given for step `step`, if another worker did that step in this role and may
        not have logged it, else None."""

    @property
    def step(self) -> int:
        """Training steps done; the next one is ``step + 1`` of the log."""
        return self._step if self._session is None else self._session.version

    @property
    def replaying(self) -> bool:
        """Whether this process has been further than `step` already, in the same way: what it logs now, it
        logged before. Asked after `step_done`."""
        return self.step < self._newest or self._repeated

    def printed(self, text: str) -> bool:
        """Whether the worker that logged before this one has printed `text`, which belongs to step `step`.

        It is looked for in that worker's log files, as far as they can be seen from this node.
        """
        if self._session is None or self.step > self._doubtful:
            return False
        return self._session.printed(text, self._who_logs())

    @property
    def epoch(self) -> int:
        """The engine's epoch: 1 plus the number of recoveries; 0 without fault tolerance."""
        return 0 if self._session is None else self._session.epoch

    @property
    def injecting(self) -> bool:
        """Whether faults are injected, so that the loop should install its injection points."""
        return self._session is not None and self._session.injecting

    def secure(self) -> None:
        """Before the script saves a checkpoint of its own: from here on no recovery goes back to before
        `step`, so that none is written once more. Every rank calls it after the same `step_done`."""
        if self._session is not None:
            self._session.secure()
            dist.barrier()  # so have all
            self._session.exchanged()

    def tell_loss(self, loss: float) -> None:
        """For the job's page, if this is a job: see `Session.tell_loss`."""
        if self._session is not None:
            self._session.tell_loss(loss)

    def point(self, name: str) -> None:
        """A place where `--ft-inject` may have this worker or its node killed; `name`: one of
        `ft_core.process.inject.POINTS`."""
        if self._session is not None:
            self._session.point(name)

    def _who_logs(self) -> Iterable[int]:
        """Other roles that may have."""
        return ()

    def _enters(self, result: Any) -> bool:
        """The loop is entered. `result`: what `step_done` was given for the step that it goes on from.

        Returns whether this process has not been there.
        """
        assert self._session is not None
        newcomer = self.step > self._newest or (self._session.joining and not self._entered)
        self._entered = True
        if newcomer:
            # A worker that takes a role over may find a step complete whose line nobody has logged.
            self.inherited = result
            self._newest, self._doubtful = self.step, self.step + 2 * self._session.every - 1
        return newcomer

    def _has_done(self) -> None:
        """`step` is one more than it was."""
        self._repeated = self.step <= self._newest
        self._newest = max(self._newest, self.step)
