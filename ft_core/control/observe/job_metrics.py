"""What the controller counts for its metrics. Pure; of bounded size, whatever the job's age."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_core.control.decide.risk import ClusterHoldings
from ft_core.control.liveness.stragglers import Finding
from ft_core.control.liveness.strikes import Device
from ft_core.control.observe.goodput import Standing
from ft_core.protocol.goodput import Cause
from ft_core.protocol.messages import Fault, RoleBeat

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of what is counted of durations, but for the last, which has none."""
PLACES = 1000
"""Kinds of failures by place, at most, that are told apart; jobs that run for months replace their nodes."""
OTHER = "other"

PHASES = (Cause.DETECTION, Cause.DECISION, Cause.WAITING, Cause.RESTORING)
"""The phases of a recovery. The first step after it comes on top."""


@dataclass
class Durations:
    """A histogram: how many took how long."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count something that took so long, so many times."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += times
        self.total += times * seconds

    def cumulative(self) -> list[int]:
        """How many took no longer than each of the bounds; the last is all."""
        return list(itertools.accumulate(self.counts))


@dataclass
class JobMetrics:
    """Counts what this controller has seen."""

    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """How often what has failed, by class, node and failure domain."""
    recoveries: Counter[str] = field(default_factory=Counter)
    """Recoveries, by the origin of the state that the job went on from."""
    rungs: Counter[str] = field(default_factory=Counter)
    """How often each rung of the ladder was climbed, by name."""
    phases: dict[str, Durations] = field(
        default_factory=lambda: {phase: Durations() for phase in (*PHASES, "total")}
    )
    """How long the phases of recoveries took, and each as a whole."""
    steps: Durations = field(default_factory=Durations)
    waited: float = 0.0
    """Seconds that all roles together have waited for copies."""
    sent: int = 0
    """Bytes of copies that were sent to other nodes."""
    xids: Counter[int] = field(default_factory=Counter)
    """Errors of GPUs, by the driver's number."""
    _xids: dict[str, Mapping[int, int]] = field(default_factory=dict)
    """What each node with any has said of them last."""
    loss: float | None = None
    """The loss that some role has told last."""
    writes: Durations = field(default_factory=Durations)
    """How long single roles took to write what they had of durable checkpoints."""
    durable: float | None = None
    """When a durable checkpoint was whole last."""
    _before: tuple[dict[Cause, float], float] | None = None
    """What time had gone to when the failure was noticed that is being recovered from, and since when."""

    def failed(self, fault: Fault, place: str, domain: str) -> None:
        """Count a failure of that class there."""
        key = str(fault), place, domain
        if key not in self.failures and len(self.failures) >= PLACES:
            key = str(fault), OTHER, OTHER
        self.failures[key] += 1

    def noticed(self, seconds: Mapping[Cause, float], cut: Mapping[Cause, float], wall: float) -> None:
        """A failure ends an epoch. `seconds`: what the job's time went to until now; `cut`: of that, what was
        cut off of a step."""
        if self._before is None:
            lost = cut.get(Cause.DETECTION, 0.0)
            before = {phase: seconds[phase] - cut.get(phase, 0.0) for phase in PHASES}
            self._before = before, wall - lost

    def resumed(self, seconds: Mapping[Cause, float], origin: str, wall: float) -> None:
        """All roles have done a step in a new epoch."""
        if self._before is None:
            return
        (before, since), self._before = self._before, None
        self.recoveries[origin] += 1
        for phase in PHASES:
            self.phases[phase].add(seconds[phase] - before[phase])
        self.phases["total"].add(wall - since)

    def beat(self, before: Mapping[int, RoleBeat], now: Mapping[int, RoleBeat]) -> None:
        """What a node has said of its roles, and says now."""
        for role, beat in now.items():
            last = before.get(role)
            if last is None or last.pid != beat.pid:
                self.sent += beat.h2h_bytes
                self.waited += beat.waited_s
            else:
                if beat.h2h_bytes > last.h2h_bytes:
                    self.sent += beat.h2h_bytes - last.h2h_bytes
                if beat.waited_s > last.waited_s:
                    self.waited += beat.waited_s - last.waited_s
            if beat.loss is not None:
                self.loss = beat.loss

    def erred(self, node: str, xids: Mapping[int, int]) -> None:
        """What the GPUs of a node have had of errors since its agent began, over whichever connection."""
        if not xids or (node not in self._xids and len(self._xids) >= PLACES):
            return
        before, self._xids[node] = self._xids.get(node, {}), xids
        for xid, count in xids.items():
            if count > before.get(xid, 0) and (xid in self.xids or len(self.xids) < PLACES):
                self.xids[xid] += count - before.get(xid, 0)

    def written(self, seconds: float, whole: bool, wall: float) -> None:
        """A role's part of a durable checkpoint is; `whole`: and with it all are."""
        self.writes.add(seconds)
        if whole:
            self.durable = wall


@dataclass(frozen=True)
class Numbers:
    """What metrics tell of the job at a moment."""

    job: dict[str, str]
    phase: str
    epoch: int
    step: int
    spares: int
    groups: tuple[int, int] | None
    """Replica groups that take part, and that are away; None: not known yet."""
    failures: dict[tuple[str, str, str], int]
    recoveries: dict[str, int]
    rungs: dict[str, int]
    recovery: dict[str, tuple[list[int], float]]
    """How long each phase of recoveries took: cumulative counts, and the sum."""
    steps: tuple[list[int], float]
    steps_redone: int
    seconds: dict[Cause, float]
    waited: float
    sent: int
    durable: float | None
    """When a durable checkpoint was whole last, in seconds since 1970."""
    suspects: int
    xids: dict[int, int]
    """Errors of GPUs, by number."""
    loss: float | None
    """The script's newest loss, where it tells it."""
    writes: tuple[list[int], float]
    broken: set[Device]
    """Devices that have failed of late."""
    held: ClusterHoldings | None
    """Who has what of the roles' state; None before anybody plays a role."""
    standing: Standing
    unprotected: str
    """Why the job is not protected, if so."""
    every: int
    """Steps from a protected version to the next."""
    stragglers: tuple[Finding, ...] = ()
    """Roles whose own part of a step takes longer than that of their like, the slowest first."""


def counted(durations: Durations) -> tuple[list[int], float]:
    """Durations as `Numbers` has them: cumulative counts, and the sum."""
    return durations.cumulative(), durations.total
