"""Who holds the others up: a role whose own part of a step takes longer than that of its like.

Its part is what it computes, and what it waits for its data (`RoleBeat.own_s`, `data_s`); while it is in an
exchange it is others who are waited for. Its like are the roles in the same place of the other replica
groups: the stages of a pipeline differ by nature. A role that has none is compared with its own past, and
that by as much as all others have changed meanwhile.

It is named once it stands out in nearly all of the last looks at it: a pause of Python's collector, a hiccup
of a loader, an evaluation are in one or two of them.

Pure: what it is told of roles, and the time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ft_core.protocol.messages import NodeName, RoleBeat

STANDS_OUT = 1.15
"""Times what its like take."""
OF_A_STEP = 0.05
"""The share of a step that it must be besides: others wait for it so long."""
NOTICED = 0.02
"""Seconds that it must be besides: of short steps a little is much."""
LOOKS = 15
"""The newest ones of each role, which count."""
OFTEN = 12
"""A role is named if it stands out in so many of them."""
SELDOM = 3
"""One that is named is so no more if it does in at most so many."""
EVERY = 1.0
"""Seconds between two looks at a role, which are of different steps as well."""
AT_ONCE = 1024
"""Roles that are looked at before somebody else has a turn."""
MOST = 16
"""That are shown of those who stand out, the slowest."""

Part = Literal["compute", "data"]
Beats = Mapping[int, RoleBeat]


class Finding(NamedTuple):
    """A role is slow. `pid`: of its worker. `seconds`: that its own part of a step takes, and `usual`: what
    it would take, by its like or by its past (`alone`)."""

    role: int
    node: NodeName
    pid: int
    part: Part
    seconds: float
    usual: float
    alone: bool

    @property
    def score(self) -> float:
        """Times the usual."""
        return round(self.seconds / self.usual, 2) if self.usual else 0.0

    @property
    def words(self) -> str:
        """For people."""
        how = "it computes longer" if self.part == "compute" else "it waits longer for its data"
        than = "before, by what the others do now" if self.alone else "its like in other replica groups"
        return (
            f"role {self.role} on {self.node} is slow: {how} than {than} ({self.seconds:.3g} s of its own in "
            f"a step, for {self.usual:.3g} s)"
        )


class Over(NamedTuple):
    """A role that was slow is not any more, and `why`."""

    finding: Finding
    why: str


@dataclass
class _Role:
    """What was seen of one."""

    node: NodeName
    pid: int
    step: int = -1
    """Done when it was looked at last."""
    slow: deque[Part | None] = field(default_factory=lambda: deque(maxlen=LOOKS))
    """For each of the newest looks, which part stood out, if one did."""
    past: list[tuple[float, float]] = field(default_factory=list)
    """What it computed, and waited for data, at first: then the medians of that alone."""
    settled: bool = False


class Stragglers:
    """Finds the slow roles of one job."""

    def __init__(self) -> None:
        self.found: dict[int, Finding] = {}
        """By role, those that are named."""
        self._standing: dict[int, Finding] = {}
        self._roles: dict[int, _Role] = {}
        self._round: deque[Sequence[int]] = deque()
        """The places that have their turn yet, in this round."""
        self._next = float("-inf")
        """When another may begin."""
        self._growth, self._ratios = 1.0, list[float]()
        """What all roles together take, by what they took at first, if it is more; and of each, in this
        round."""

    @property
    def standing_out(self) -> list[Finding]:
        """Who did in the newest look, named or not, the slowest first."""
        return sorted(self._standing.values(), key=lambda each: (-each.score, each.role))[:MOST]

    def stands_out(self, found: Finding) -> bool:
        """Whether a role that is named does so yet, in the same worker and on the same node."""
        now = self._standing.get(found.role)
        return now is not None and (now.node, now.pid) == (found.node, found.pid)

    def look(
        self,
        alike: Sequence[Sequence[int]],
        places: Mapping[int, NodeName],
        heard: Callable[[NodeName], Beats],
        now: float,
    ) -> list[Finding | Over]:
        """What is new of some of the roles; the others have their turn at the next calls. `alike`: sets of
        roles that do the same. `places`: role -> node, and `heard`: what a node has said of its own."""
        news: list[Finding | Over] = []
        if not self._round and now >= self._next:
            for roles in alike:  # of more than that, some are enough to be compared with
                parts = -(-len(roles) // AT_ONCE)
                self._round.extend(roles[part::parts] for part in range(parts))
            self._next = now + EVERY
            if self._ratios:
                self._growth, self._ratios = max(1.0, statistics.median_low(self._ratios)), []
            for role in self._roles.keys() - places.keys():
                news += self._ends(role, "it is away")
        looked = 0
        while self._round and looked < AT_ONCE:
            roles = self._round.popleft()
            looked += len(roles)
            news += self._place([role for role in roles if role in places], places, heard)
        return news

    def _place(
        self, roles: Sequence[int], places: Mapping[int, NodeName], heard: Callable[[NodeName], Beats]
    ) -> Iterable[Finding | Over]:
        """Look at roles that are alike."""
        news: list[Finding | Over] = []
        known: dict[int, RoleBeat] = {}
        for role in roles:
            node, seen = places[role], self._roles.get(role)
            if seen is not None and seen.node != node:
                news += self._ends(role, f"it goes on on {node}")
            beat = heard(node).get(role)
            if beat is not None and beat.own_s > 0:
                known[role] = beat
        compute = statistics.median_low([beat.own_s for beat in known.values()] or [0.0])
        data = statistics.median_low([beat.data_s for beat in known.values()] or [0.0])
        whole = statistics.median_low([beat.own_s + beat.data_s for beat in known.values()] or [0.0])
        for role, beat in known.items():
            seen = self._roles.get(role)
            if seen is None or seen.pid != beat.pid:
                past = ([], False) if seen is None else (seen.past, seen.settled)
                seen = self._roles[role] = _Role(places[role], beat.pid, -1, deque(maxlen=LOOKS), *past)
            if beat.step <= seen.step:
                continue
            seen.step = beat.step
            self._remember(seen, beat)
            usual = compute, data, whole
            if len(known) == 1 < len(roles):
                continue  # of its like nothing is known yet
            if len(known) == 1:
                if not seen.settled:
                    continue
                (then, waited), grown = seen.past[0], self._growth
                usual = then * grown, waited * grown, (then + waited) * grown
            news += self._judge(role, seen, beat, usual, alone=len(known) == 1)
        return news

    def _remember(self, seen: _Role, beat: RoleBeat) -> None:
        if seen.settled:
            if (before := sum(seen.past[0])) > 0:
                self._ratios.append((beat.own_s + beat.data_s) / before)
            return
        seen.past.append((beat.own_s, beat.data_s))
        if len(seen.past) == LOOKS:
            computed, waited = zip(*seen.past, strict=True)
            seen.past[:] = [(statistics.median(computed), statistics.median(waited))]
            seen.settled = True

    def _judge(
        self, role: int, seen: _Role, beat: RoleBeat, usual: tuple[float, float, float], alone: bool
    ) -> Iterable[Finding | Over]:
        """By one more look at it."""
        compute, data, whole = usual
        seconds = beat.own_s + beat.data_s
        if seconds < max(STANDS_OUT * whole, whole + max(NOTICED, OF_A_STEP * beat.step_s)):
            seen.slow.append(None)
            self._standing.pop(role, None)
        else:
            part: Part = "data" if beat.data_s - data > beat.own_s - compute else "compute"
            seen.slow.append(part)
            self._standing[role] = Finding(role, seen.node, seen.pid, part, seconds, whole, alone)
        times = len(seen.slow) - seen.slow.count(None)
        if role in self.found:
            full = len(seen.slow) == LOOKS
            return (
                self._named_no_more(role, "it is as fast as others again")
                if (full and times <= SELDOM)
                else ()
            )
        if times < OFTEN or role not in self._standing:
            return ()
        mostly: Part = "data" if 2 * seen.slow.count("data") > times else "compute"
        self.found[role] = self._standing[role]._replace(part=mostly)
        return (self.found[role],)

    def _ends(self, role: int, why: str) -> Iterable[Over]:
        """What was seen of it says nothing any more."""
        self._roles.pop(role, None)
        self._standing.pop(role, None)
        return self._named_no_more(role, why)

    def _named_no_more(self, role: int, why: str) -> Iterable[Over]:
        finding = self.found.pop(role, None)
        return () if finding is None else (Over(finding, why),)
