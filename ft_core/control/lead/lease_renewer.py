"""The thread that gets a lease for a controller, and keeps it. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ft_core.errors import ConfigError
from ft_core.leadership.base import Grant, Leader, Leadership, LeadershipError, Notes
from ft_core.leadership.lease import RENEW, Lease, clock
from ft_core.process.parent import gone

log = logging.getLogger(__name__)

_WARN_EVERY = 60.0
LAST_WORD = 2.0
"""Seconds that a controller which ends has to say that it leads no more; then its lease runs out."""


@dataclass(frozen=True)
class Granted:
    """This process leads, for as long as `lease` holds."""

    lease: Lease
    notes: Notes
    job: str
    """The job's id."""


@dataclass(frozen=True)
class Over:
    """The job is over, with this exit code."""

    code: int


News = Granted | Over | Exception


@dataclass(frozen=True)
class _Order:
    """What is to be done with the lease of a term, that others must see."""

    term: int
    call: Callable[[Grant], bool]
    """Returns False once the lease is there no more."""
    notes: bool = False
    """Whether it does no more than to leave notes, for which the next ones may stand."""


class LeaseRenewer:
    """Campaigns, and renews. What it has to say is put into `news`, of the event loop that it was made in; an
    error of its own as well. What it is told to do with the lease of a term is not done with another."""

    def __init__(self, leadership: Leadership, address: str, begins: bool) -> None:
        """`begins`: whether it may lead where a job is over, which is the beginning of another."""
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self._leadership, self._address = leadership, address
        self._loop = asyncio.get_running_loop()
        self._orders: deque[_Order] = deque()
        self._ordered = threading.Condition()
        self._begins, self._floor = begins, 0
        self._job, self._term = "", 0
        """The job's id, once it was under way here, and the newest term of it that was seen."""
        self._warned = float("-inf")
        threading.Thread(target=self._serve, name="ft-lease", daemon=True).start()

    # -- for the controller ------------------------------------------------------------------------

    def note(self, term: int, notes: Notes) -> None:
        """Leave this for a successor, soon, in place of what was to be left before."""
        self._put(_Order(term, lambda grant: self._leadership.note(grant, notes), notes=True))

    def end(self, term: int, code: int, agreed: Callable[[], None]) -> None:
        """Have it written down that the job is over, for as long as the lease holds; then `agreed`."""

        def end(grant: Grant) -> bool:
            if self._leadership.resign(grant, code):
                told = threading.Event()
                self._tell(agreed)
                self._tell(told.set)
                told.wait(LAST_WORD)  # the lease, which is gone, is to hold until then
            return False

        self._put(_Order(term, end))

    def resign(self, term: int, floor: int = 0) -> None:
        """Lead no more; and next time in a term above `floor`."""
        self._floor = max(self._floor, floor)
        self._put(_Order(term, self._resign))

    def leave(self, term: int, notes: Notes) -> None:
        """Lead no more, and leave these notes: this process is about to end."""
        told = threading.Event()

        def leave(grant: Grant) -> bool:
            self._leadership.note(grant, notes)
            self._leadership.resign(grant)
            told.set()
            return False

        self._put(_Order(term, leave))
        told.wait(LAST_WORD)

    def _resign(self, grant: Grant) -> bool:
        self._leadership.resign(grant)
        return False

    def _put(self, order: _Order) -> None:
        with self._ordered:
            if order.notes:
                self._orders = deque(o for o in self._orders if not o.notes or o.term != order.term)
            self._orders.append(order)
            self._ordered.notify()

    # -- the thread --------------------------------------------------------------------------------

    def _tell(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # nobody is there any more to be told
            self._loop.call_soon_threadsafe(call)

    def _serve(self) -> None:
        try:
            self._run()
        except Exception as error:  # this thread's own: the controller must not wait for it
            self._say(error)

    def _run(self) -> None:
        while not gone():
            grant, asked = None, clock()
            try:
                leader = self._leadership.look()
                if self._concerns(leader) and leader.over is not None:
                    self._say(Over(leader.over))
                    return
                if not leader.address and (leader.over is None or self._begins):
                    floor = max(self._floor, self._term)
                    grant = self._leadership.acquire(self._address, floor, self._job)
            except LeadershipError as error:
                self._warn(error)
            if grant is not None:
                self._job, self._term = grant.job, grant.term
                lease = Lease(grant.term, grant.seconds, asked)
                self._say(Granted(lease, grant.notes, grant.job))
                self._keep(grant, lease)
                lease.ends()
            time.sleep(self._leadership.every * (0.5 + random.random()))

    def _concerns(self, leader: Leader) -> bool:
        """Whether what was found is of this job. Raises LeadershipError if it is older than what was found
        before, and ConfigError if there is another job, which has the name now."""
        if not self._job and leader.over is None:  # what is over when this process comes is another job
            self._job = leader.job
        if not leader.job or not self._job:
            return False
        if leader.term < self._term:
            raise LeadershipError(
                f"{self._leadership.place}: what is kept there is of term {leader.term}, which is over: "
                f"there was one of term {self._term}"
            )
        if leader.job != self._job:
            raise ConfigError(
                f"{self._leadership.place}: another job, {leader.job}, has this name by now: this one, "
                f"{self._job}, is over or lost, and its nodes end"
            )
        self._term = leader.term
        return True

    def _keep(self, grant: Grant, lease: Lease) -> None:
        """Renew the lease and carry out orders, until the lease is lost or given up."""
        order: _Order | None = None
        while lease.holds(asked := clock()) and not gone():
            try:
                if not self._leadership.renew(grant):
                    return
                lease.renewed(asked)
                while (order := order or self._next(grant.term, asked + RENEW)) is not None:
                    if not order.call(grant):
                        return
                    order = None
                    if clock() >= asked + RENEW:  # one at least, however long it takes to renew
                        break
            except LeadershipError as error:
                self._warn(error)
                time.sleep(RENEW / 4)

    def _next(self, term: int, until: float) -> _Order | None:
        """The controller's next order about this term, before the lease is to be renewed again."""
        with self._ordered:
            self._ordered.wait_for(lambda: self._orders, max(0.0, until - clock()))
            while self._orders:
                if (order := self._orders.popleft()).term == term:
                    return order
        return None

    def _say(self, news: News) -> None:
        self._tell(lambda: self.news.put_nowait(news))

    def _warn(self, error: LeadershipError) -> None:
        """Log that it is not clear who leads, once a minute at most."""
        if clock() > self._warned + _WARN_EVERY:
            self._warned = clock()
            log.warning("it is not clear who leads the job, and nobody may: %s", error)
