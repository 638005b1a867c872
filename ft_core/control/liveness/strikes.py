"""What has failed where, and of what: what is tried once more in place, and what counts against a node.

Pure. A failure is a *strike*. It is kept for a while, and by the controller's successors, since the agents
keep it too (`KeepStrikes`). Whatever is decided by counting failures is decided here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from msgspec.structs import replace

from ft_core.control.liveness.stragglers import Finding
from ft_core.errors import FAILED
from ft_core.protocol.domains import place
from ft_core.protocol.messages import DEVICE_FAULTS, FailureRecord, Fault, Suspect, WorkerLost

TRIES = 8
"""Recoveries in a row without a step that nobody had done before, after which the next rung of the ladder is
tried."""
_KEPT = 256
"""Strikes that are kept at most, the newest."""


ALIKE = 2
"""Times that a newcomer's start-up has failed of the same before it is not tried a third time."""


class Retry(Enum):
    """Whether a role is tried again whose worker has failed."""

    NEVER = auto()
    """Not in place: the next rung of the ladder is tried."""
    ONCE = auto()
    """In place, unless the same comes again in the same step."""
    YES = auto()
    """In place, up to `TRIES` recoveries without progress."""


class Counts(Enum):
    """Whether it counts against the node that it was on."""

    NO = auto()
    AGAIN = auto()
    """The failure counts from its second time on that node on."""
    YES = auto()
    OUT = auto()
    """The failure alone makes the node one to be avoided."""


RULES: dict[Fault, tuple[Retry, Counts]] = {
    Fault.EXCEPTION: (Retry.ONCE, Counts.NO),
    Fault.EXITED: (Retry.NEVER, Counts.NO),
    Fault.LEFT: (Retry.NEVER, Counts.NO),
    Fault.INTERRUPTED: (Retry.NEVER, Counts.NO),
    Fault.REFUSED: (Retry.NEVER, Counts.NO),
    Fault.DIVERGED: (Retry.NEVER, Counts.NO),
    Fault.ENGINE: (Retry.YES, Counts.NO),
    Fault.MEMORY: (Retry.ONCE, Counts.AGAIN),
    Fault.DEVICE_MEMORY: (Retry.ONCE, Counts.AGAIN),
    Fault.DEVICE: (Retry.YES, Counts.YES),
    Fault.TRANSPORT: (Retry.YES, Counts.NO),
    Fault.LINK: (Retry.YES, Counts.AGAIN),
    Fault.STORAGE: (Retry.YES, Counts.YES),
    Fault.LOADER: (Retry.YES, Counts.AGAIN),
    Fault.KILLED: (Retry.YES, Counts.YES),
    Fault.OUT_OF_MEMORY: (Retry.YES, Counts.YES),
    Fault.CRASHED: (Retry.YES, Counts.YES),
    Fault.CORRUPTION: (Retry.YES, Counts.YES),
    Fault.TERMINATED: (Retry.YES, Counts.NO),
    Fault.NODE: (Retry.YES, Counts.YES),
    Fault.DEVICE_WARNING: (Retry.YES, Counts.YES),
    Fault.DEVICE_FAULTY: (Retry.YES, Counts.NO),
    Fault.DEVICE_CONDEMNED: (Retry.YES, Counts.OUT),
    Fault.SLOW: (Retry.YES, Counts.OUT),
}
"""What each class of failure leads to, while the job trains. Before it does, an exception of the script's
ends it."""

_NOT_AGAIN = {
    Fault.EXITED: "the script wants it to end",
    Fault.LEFT: "the others would wait for it",
    Fault.INTERRUPTED: "somebody wants it to end",
    Fault.REFUSED: "to try again would not help",
    Fault.DIVERGED: "it cannot take part with the others",
}


FINDINGS = frozenset({Fault.DEVICE_WARNING, Fault.DEVICE_FAULTY, Fault.DEVICE_CONDEMNED, Fault.SLOW})
"""What is found, though nothing has failed."""
SLOW_AGAIN = 3600.0
"""Seconds after which a machine, or a role, may be moved once more since it is slow."""
APART = 30.0
"""Seconds between two findings, at least, from one device and of the same kind."""

FINAL = frozenset({Fault.INTERRUPTED, Fault.REFUSED})
"""What no restart is tried against: somebody wants the job to end, or it cannot even begin."""


class Device(NamedTuple):
    """A device of a machine."""

    place: str
    number: int


@dataclass
class Strikes:
    """The failures of one job that count against places. Times are the controller's."""

    limit: int
    """How many strikes within `seconds` make a node one to be avoided; 0: none is."""
    seconds: float
    _all: list[tuple[float, FailureRecord]] = field(default_factory=list)
    """The failures, oldest first, each with its time."""
    _forgiven: dict[str, float] = field(default_factory=dict)
    """Places, and when somebody forgave them."""

    def add(self, strike: FailureRecord, now: float) -> bool:
        """Add a failure. Returns whether it is news: a controller that was restarted is told again."""
        if self.knows(strike, now):
            return False
        kept = sorted([*self._kept(now), (now - strike.age, strike)], key=lambda kept: kept[0])
        beyond = [each for each in kept if RULES[each[1].fault][1] is not Counts.OUT][
            : max(0, len(kept) - _KEPT)
        ]
        self._all = [each for each in kept if each not in beyond]
        return True

    def knows(self, strike: FailureRecord, now: float) -> bool:
        """Whether a failure is known already. A device may report the same again later: that is another
        one."""
        again = strike.fault in FINDINGS
        known = (then for then, other in self._all if _same(strike, other))
        return any(not again or abs(then - now + strike.age) < APART for then in known)

    def was_forgiven(self, strike: FailureRecord, now: float) -> bool:
        """Whether somebody has looked at its place since: an agent that was away says it once more."""
        return now - strike.age <= self._forgiven.get(strike.place, -math.inf)

    def take(self, strikes: Iterable[FailureRecord], now: float) -> None:
        """Take over what another controller knew."""
        for strike in strikes:
            self.add(strike, now)

    def value(self, now: float) -> list[FailureRecord]:
        """What a successor of the controller needs to know of failures."""
        return [replace(strike, age=max(0.0, now - at)) for at, strike in self._kept(now)]

    def against(self, where: str, now: float) -> list[FailureRecord]:
        """What counts against a place. What has followed its role to another one, in the same step, does not.

        A strike of its device counts against the node: its roles go elsewhere, and the device is named.
        """
        here = [
            replace(strike, age=max(0.0, now - at))
            for at, strike in self._current(now)
            if strike.place == where and not self._follows(strike)
        ]
        here = _once(here)
        return [
            strike
            for at, strike in enumerate(here)
            if (counts := RULES[strike.fault][1]) in (Counts.YES, Counts.OUT)
            or (counts is Counts.AGAIN and any(other.fault is strike.fault for other in here[:at]))
            or (counts is Counts.NO and strike.fault is Fault.EXCEPTION and strike.step < 0)
        ]

    def avoided(self, now: float) -> set[str]:
        """Places that are not used while there are others."""
        failures = Counter(strike.place for _, strike in self._all)
        often = (where for where, count in failures.items() if count >= self.limit > 0)
        out = {s.place for _, s in self._current(now) if RULES[s.fault][1] is Counts.OUT}
        return out | {where for where in often if len(self.against(where, now)) >= self.limit}

    def lives(self, node: str, agent: int) -> bool:
        """A node that was taken for lost goes on where it was: that was no failure. Whether it was one."""
        before = len(self._all)
        lost = (place(node), -1, agent)
        self._all = [(at, s) for at, s in self._all if (s.place, s.role, s.pid) != lost]
        return len(self._all) < before

    def forgive(self, where: str, now: float) -> int:
        """Forget what is known of a place. How many counted."""
        counted = len(self.against(where, now))
        self._forgiven = {at: when for at, when in self._forgiven.items() if now - when < self.seconds}
        self._forgiven[where] = now
        self._all = [(at, strike) for at, strike in self._all if strike.place != where]
        return counted

    def broken(self, now: float) -> set[Device]:
        """Devices that have failed of late. What has followed its role to another one, in
        the same step, was not the device's."""
        known = [s for _, s in self._current(now) if s.fault in DEVICE_FAULTS and s.device >= 0]
        return {Device(s.place, s.device) for s in known if not self._follows(s)}

    def moved_as_slow(self, now: float) -> str:
        """The place that was taken out of late as a role there was slow. Empty: none was."""
        return next((s.place for _, s in reversed(self._kept(now)) if s.fault is Fault.SLOW), "")

    def places(self) -> set[str]:
        """Places of which something is known."""
        return {strike.place for _, strike in self._all}

    def again(self, lost: WorkerLost) -> bool:
        """Whether this role has failed of the same in the same step before."""
        return bool(self._before(lost))

    def alike(self, lost: WorkerLost) -> bool:
        """Whether this role has failed of the same twice before on its way to its first step, wherever it
        was: it would again."""
        return lost.step < 0 and len(self._before(lost)) >= ALIKE

    def _before(self, lost: WorkerLost) -> set[int]:
        """Other workers of this role that have failed of the same in the same step, by the same fault: what
        was a device's says nothing of the script."""
        same = lost.role, lost.step, lost.signature, lost.fault
        known = {
            s.pid for _, s in self._all if s.signature and (s.role, s.step, s.signature, s.fault) == same
        }
        return known - {lost.pid}

    def everywhere(self, role: int, step: int) -> list[str]:
        """The places where a role has failed in this step."""
        return sorted({s.place for _, s in self._all if s.role == role and s.step == step})

    def _follows(self, strike: FailureRecord) -> bool:
        if strike.role < 0 or strike.step < 0:
            return False
        return len(self.everywhere(strike.role, strike.step)) > 1

    def _kept(self, now: float) -> list[tuple[float, FailureRecord]]:
        """Return the strikes that count, and those that say who is not moved once more."""
        longer = max(self.seconds, SLOW_AGAIN)
        return [
            (at, s) for at, s in self._all if now - at <= (longer if s.fault is Fault.SLOW else self.seconds)
        ]

    def _current(self, now: float) -> list[tuple[float, FailureRecord]]:
        return [(at, strike) for at, strike in self._all if now - at <= self.seconds]


def of_worker(lost: WorkerLost, node: str, trained: bool = True) -> FailureRecord:
    """The end of a worker. `trained`: somebody has come through what an exception in start-up comes of: then
    that counts against the node."""
    script = lost.fault is Fault.EXCEPTION and not trained
    step = max(lost.step, 0) if script else lost.step
    return FailureRecord(
        place(node),
        device=lost.device,
        role=lost.role,
        pid=lost.pid,
        step=step,
        fault=lost.fault,
        signature=lost.signature,
        age=lost.age,
    )


def of_link(node: str, said: Suspect) -> FailureRecord:
    """A link that has failed on a node, in an epoch, whose number stands in for a process's."""
    return _record(node, Fault.LINK, role=said.role, pid=said.epoch)


def of_corruption(node: str, device: int, role: int, pid: int, step: int) -> FailureRecord:
    """State that was computed wrongly, in the version `step`."""
    return _record(node, Fault.CORRUPTION, device=device, role=role, pid=pid, step=step)


def of_slow(found: Finding) -> FailureRecord:
    """A node that is taken out since a role there is slow."""
    signature = f"slow: {found.part}"
    return replace(_record(found.node, Fault.SLOW, pid=found.pid, role=found.role), signature=signature)


def of_node(node: str, agent: int, fault: Fault) -> FailureRecord:
    """The loss of a node. `agent`: its pid."""
    return _record(node, fault, pid=agent)


def _record(
    node: str, fault: Fault, *, pid: int, device: int = -1, role: int = -1, step: int = -1
) -> FailureRecord:
    """The record of a failure of now, which has no exception."""
    return FailureRecord(place(node), device, role, pid, step, fault, signature="", age=0.0)


def not_in_place(lost: WorkerLost, trained: bool, same_again: bool) -> str:
    """Why to go on in place does not help against this failure; empty: it may. `trained`: all have done a
    step."""
    retry = RULES[lost.fault][0]
    if retry is Retry.NEVER:
        return _NOT_AGAIN[lost.fault]
    if lost.fault is Fault.EXCEPTION and not trained:
        return "no step was done yet"
    if retry is Retry.ONCE and lost.step >= 0 and same_again:
        return f"the same again in the step after version {lost.step}"
    return ""


def exit_code(lost: WorkerLost) -> int:
    """What `ftrun` ends with: the script's own exit code; 1 if it has none, or one that is taken."""
    return lost.code if lost.code > 0 and lost.code != FAILED else 1


def _once(here: Iterable[FailureRecord]) -> list[FailureRecord]:
    """All failures; of what several devices of a machine warn of at the same time, as a link's other end has
    failed, the first."""
    found, newest = list[FailureRecord](), math.inf
    for strike in here:  # oldest first
        warns = strike.fault is Fault.DEVICE_WARNING
        if warns and newest - strike.age < APART:
            continue
        newest = strike.age if warns else newest
        found.append(strike)
    return found


def _same(a: FailureRecord, b: FailureRecord) -> bool:
    if (a.place, a.role, a.pid, a.fault) != (b.place, b.role, b.pid, b.fault):
        return False
    if (a.device, a.signature) != (b.device, b.signature):
        return False
    return a.fault is not Fault.CORRUPTION or a.step == b.step  # of which a worker does not end
