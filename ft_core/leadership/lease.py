"""What a lease proves to whom: pure, for the processes and for the simulator.

A *term* is one leadership, by number: each is higher than all before it. That two leaders never both decide
(INV-16, one leader) rests on three rules, each of which is one of the classes or functions here.

1. A leader decides nothing once its lease may have run out (`Lease`). It counts from before it asked.
2. An agent obeys a leader only for a while (`trust`) after it began to look whether there is a newer term and
   found none (`Follower`). Once it knows of one it never obeys an older one.
3. A new leader decides nothing before that while is over for everybody (`settled_after`). From then on nobody
   obeys its predecessor, whatever that believes: should it have been stopped between deciding and saying so,
   or have a clock that stands still.

And epochs are numbered by term (`first_epoch`), so what of an older leader's epochs is still on its way
between agents and workers is refused as that of any older epoch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

SECONDS = 2.0
"""How long a lease lasts. etcd grants no shorter ones, as it is configured by default."""
RENEW = SECONDS / 4
"""Between two renewals."""
DRIFT = 0.1
"""By what part of a time two clocks may differ over it."""
LOOK = 0.5
"""Seconds between two looks of a process at who leads, in a job of ordinary size."""
SLACK = 1.0
"""Seconds more that a look may take, or fail, before an agent does not know whom to obey."""
DOUBT = 10.0
"""Seconds for which it waits for a look then, and what it was told waits with it, before it hangs up: to its
leader it is lost."""
EPOCHS = 1_000_000
"""That a term has numbers for."""


def clock() -> float:
    """Seconds, those in which this machine was suspended included: leases run out meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def look_every(nodes: int, per_second: float) -> float:
    """Seconds between two looks, so that all nodes together look `per_second` times at most."""
    return max(LOOK, nodes / per_second)


def trust(every: float) -> float:
    """Seconds for which an agent obeys after a look, of those that it takes `every` so many seconds."""
    return every + SLACK


def settled_after(every: float) -> float:
    """Seconds after which a new leader may decide, since nobody obeys an older one any more."""
    return trust(every) * (1 + DRIFT)


def first_epoch(term: int) -> int:
    """The lowest number of an epoch that a leader of this term begins."""
    return (term - 1) * EPOCHS + 1


@dataclass
class Lease:
    """A leader's own view of its lease: it ends here before it ends where it is kept."""

    term: int
    seconds: float = math.inf
    asked: float = 0.0
    """When the newest of the requests that were granted was sent."""

    def renewed(self, asked: float) -> None:
        """A request sent at that time was granted."""
        self.asked = max(self.asked, asked) if self.asked > -math.inf else self.asked

    def ends(self) -> None:
        """It is lost, or given up."""
        self.asked = -math.inf

    def holds(self, now: float) -> bool:
        """Whether nobody else can have it."""
        return now < self.asked + self.seconds * (1 - DRIFT)


@dataclass
class Follower:
    """An agent's view: whom it obeys, and for how long."""

    trust: float = math.inf
    term: int = 0
    """The newest that it knows of."""
    _speaker: int = field(default=0, init=False)
    """The term of whoever it is connected to; 0 before that is said."""
    _dialed: int = field(default=0, init=False)
    """The term of whoever it has tried to reach; 0: there is only one leader, ever."""
    _seen: float = field(default=-math.inf, init=False)
    """When the newest look was begun that found no newer term."""

    def looked(self, began: float, term: int) -> None:
        """A look that began then has found this to be the newest term."""
        self._learn(term)
        if term == self.term:
            self._seen = max(self._seen, began)

    def connected(self, term: int) -> None:
        """There is another connection, with who leads in that term, for all that is known."""
        self._speaker, self._dialed = 0, term

    def led_by(self, term: int) -> None:
        """Whoever it is connected to leads in this term."""
        self._learn(term)
        self._speaker = term

    @property
    def deposed(self) -> bool:
        """Whether nothing that is said on its connection counts, or will be: there is a newer leader. The one
        that it has reached may have been stopped before its first word."""
        return 0 < (self._speaker or self._dialed) < self.term

    def obeys(self, now: float) -> bool:
        """Whether what is said on its connection counts now. If not, it may after another look."""
        return self._speaker == self.term and now - self._seen < self.trust

    def _learn(self, term: int) -> None:
        if term > self.term:
            self.term, self._seen = term, -math.inf
