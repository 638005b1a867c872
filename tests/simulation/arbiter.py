"""Who keeps the lease of a job's leader: as etcd, one truth for all, which cannot always be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ft_core.leadership import lease

from .world import Process, World

if TYPE_CHECKING:
    from .control import SimController
    from .job import SimJob

T = TypeVar("T")
MACHINE = "arbiter"
_LOST = 1.0
"""Seconds after which who has asked does not wait any longer."""


class Arbiter:
    """One lease, and what its holders have left for their successors."""

    def __init__(self, job: SimJob) -> None:
        self.world: World = job.world
        self._network, self._outcome = job.network, job.outcome
        self.term = 0
        """The newest that was granted."""
        self.holder: SimController | None = None
        self.down = False
        self.over: int | None = None
        self._until = 0.0

    def ask(
        self, process: Process, machine: str, question: Callable[[], T], answer: Callable[[T | None], None]
    ) -> None:
        """`answer` is called once, with None if there was none in time; what was asked may have happened."""
        there, back = self.world.delay(), self.world.delay()

        def reached() -> bool:
            return not self.down and self._network.joins(machine, MACHINE)

        def none_after(seconds: float) -> None:
            process.later(max(0.0, seconds), lambda: answer(None))

        def asked() -> None:
            if not reached():
                none_after(_LOST - there)
                return
            value = question()
            if there + back < _LOST:
                self.world.at(back, lambda: answered(value))
            else:
                none_after(_LOST - there)

        def answered(value: T) -> None:
            if reached():
                process.do(lambda: answer(value))
            else:
                none_after(_LOST - there - back)

        self.world.at(there, asked)

    @property
    def leader(self) -> SimController | None:
        """Who leads, as far as is known here."""
        return self.holder if self.world.now < self._until else None

    def acquire(self, candidate: SimController, floor: int) -> int:
        """The new term, or 0 if somebody leads."""
        if self.leader is not None or self.over is not None:
            return 0
        self.term = max(self.term, floor) + 1
        self.holder, self._until = candidate, self.world.now + lease.SECONDS
        self._outcome.terms += 1
        self.world.trace(f"{candidate.name} leads in term {self.term}")
        return self.term

    def renew(self, candidate: SimController, term: int) -> bool:
        """Whether it still has its lease, which begins anew."""
        if not self._has(candidate, term):
            return False
        self._until = self.world.now + lease.SECONDS
        return True

    def end(self, candidate: SimController, term: int, code: int) -> bool:
        """The job is over, if it is the leader who says so."""
        if self._has(candidate, term):
            self.over = code
        return self.over == code

    def note(self, candidate: SimController, term: int, write: Callable[[], None]) -> bool:
        """What a successor must know, if it is the leader who says so."""
        if self._has(candidate, term):
            write()
        return True

    def _has(self, candidate: SimController, term: int) -> bool:
        return self.leader is candidate and self.term == term
