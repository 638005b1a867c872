"""What failures cost a job, and what copies, spares and intervals are worth: expected shares of its time.

Failures are a Poisson process of one rate, and every one takes a node; both are what the literature assumes
(FlashRecovery, section II; DeadPool, section V-C). The shares hold for a failure every few minutes, too, as
long as those that take all copies of something are rare beside the others. Times are in seconds, rates per
second. The derivation, and where the sources differ, are in `docs/economics.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HOUR = 3600.0
MONTH = 730 * HOUR
_LEAST, _MOST = 1.0, 1e8
"""Seconds between which the best interval is looked for."""


@dataclass(frozen=True)
class Failures:
    """What fails. A node is lost with any of its devices."""

    nodes: int
    of_node: float
    """Failures of one node, per second."""
    repair: float
    """Seconds until a lost node is back, or another one is there."""

    @property
    def rate(self) -> float:
        """Failures of the job."""
        return self.nodes * self.of_node


@dataclass(frozen=True)
class Protection:
    """How a job goes on after a failure.

    `step` is a step's seconds, of which `wait` are spent waiting for copies. A version is kept in memory
    every `every` steps, and is safe `lag` seconds after its end; `copies` nodes have it besides its own (0:
    none, and each failure goes back to storage). A recovery from memory takes `recovery`, one from storage
    `restart`. On storage there is a version every `interval` seconds; writing it stops training for `pause`,
    and takes `write`.
    """

    step: float
    wait: float
    every: int
    lag: float
    copies: int
    recovery: float
    restart: float
    interval: float
    pause: float
    write: float
    spares: int


@dataclass(frozen=True)
class Shares:
    """What a job's time goes to; the sum is 1."""

    productive: float
    copies: float
    """Waiting for copies of a step's state."""
    storage: float
    """Standing still while a version is written."""
    redone: float
    recovery: float
    nodes: float
    """Waiting for a node, as no spare is left."""


def kept(rate: float, period: float, lag: float) -> float:
    """The share of running time that is not lost, where a failure goes back to the last of the versions
    that are made every `period` seconds and are safe `lag` seconds later.

    After a failure the time until the next is exponential, whatever was before: of a run of X seconds
    floor((X - lag) / period) periods are kept. Their mean, times the rate, is this. To first order it is
    1 - rate (lag + period / 2).
    """
    if not rate:
        return 1.0
    x = rate * period
    return x * math.exp(-rate * lag - x) / -math.expm1(-x) if x < 700 else 0.0


def lost_in_memory(failures: Failures, window: float, copies: int) -> float:
    """The chance that a failure takes the last copy of something.

    Each node's state is on the `copies` next ones of a ring. A failed node is in copies + 1 runs of so many
    and one neighbours; the others of a run must have failed within `window` seconds, until copies are made
    again. (DeadPool's union bound, equation 1, with the ring's runs in place of all shards.)
    """
    if not copies:
        return 1.0
    other = -math.expm1(-failures.of_node * window)
    if copies == 1:
        return -math.expm1(-2 * failures.of_node * window)
    return min(1.0, (copies + 1) * other**copies)


def waiting(rate: float, repair: float, spares: int) -> float:
    """The share of time in which no spare is left: Erlang's loss formula with spares + 1 servers.

    Nodes that are out are in repair, each by itself; the one after the last spare stops the job, and while it
    stands still nothing fails. The formula holds for repairs of any distribution with this mean.
    """
    load, blocked = rate * repair, 1.0
    for out in range(1, spares + 2):
        blocked = load * blocked / (out + load * blocked)
    return blocked


def shares(failures: Failures, protection: Protection) -> Shares:
    """What a job's time goes to."""
    rate, p = failures.rate, protection
    stands = waiting(rate, failures.repair, p.spares)
    lost = lost_in_memory(failures, p.recovery + p.lag, p.copies)
    # A recovery begins anew with each failure in it: it trains where the last failure is long enough ago.
    runs = (1 - lost) * math.exp(-rate * p.recovery) + lost * math.exp(-rate * p.restart)
    period = p.every * p.step if p.copies else p.interval + p.pause
    new = runs * kept(rate, period, p.lag if p.copies else p.write)
    if p.copies and new:  # what memory loses goes back further, in time that was new
        new *= kept(rate * lost / new, p.interval + p.pause, p.write)
    pause = p.pause / (p.interval + p.pause)
    waits = (1 - pause) * p.wait / p.step
    up = 1 - stands
    return Shares(
        productive=up * new * (1 - pause - waits),
        copies=up * new * waits,
        storage=up * new * pause,
        redone=up * (runs - new),
        recovery=up * (1 - runs),
        nodes=stands,
    )


def best_interval(failures: Failures, protection: Protection) -> float:
    """Seconds between versions on storage that make most of the time productive: FlashRecovery's t*
    (equation 3) where failures are rare beside it; not less than a version takes to write. Golden-section
    search over its logarithm."""
    ratio = (math.sqrt(5) - 1) / 2

    def lost(log: float) -> float:
        return -shares(failures, replace(protection, interval=math.exp(log))).productive

    low, high = math.log(max(_LEAST, protection.write)), math.log(_MOST)
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = lost(a), lost(b)
    while high - low > 1e-4:
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = lost(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = lost(b)
    return math.exp((low + high) / 2)


def flash_recovery(total: float, failures: float, recovery: float, pause: float) -> tuple[float, float]:
    """FlashRecovery's equations 3 and 4: the interval t* = sqrt(2 d k0 / m), and what m failures in d seconds
    cost then."""
    interval = math.sqrt(2 * total * pause / failures)
    return interval, failures * recovery + math.sqrt(2 * total * pause * failures)


def at_regular_times(between: float, stall: float, degraded: float = 0.0, groups: int = 1) -> float:
    """The share of time that is productive where failures come at equal intervals, as FT-HSDP reckons in
    section 6.1: all stand still for `stall` seconds, and one of `groups` replica groups is away for
    `degraded` more."""
    return max(0.0, between - stall - degraded / groups) / between


def years_between_losses(failures: Failures, protection: Protection) -> float:
    """Until what is in memory is expected not to suffice."""
    lost = lost_in_memory(failures, protection.recovery + protection.lag, protection.copies)
    return 1 / (failures.rate * lost * 12 * MONTH) if failures.rate * lost else math.inf
