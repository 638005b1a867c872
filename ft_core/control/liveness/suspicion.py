"""Whether a node is lost. Silence is evidence, not a verdict: pure, from what was heard and when.

A node is lost when its connection ended and it does not come back, or others find that its process has ended;
or when it is silent and nothing speaks for it. What speaks for it: another node that reaches it, and steps
that finish on all roles, since none can without its workers. All times are of the controller's clock, which
counts only the time that it was awake: its own stalls are nobody else's silence.

Beside each agent is a process that does nothing but say that the machine lives, and how long ago the agent
did anything (`node.link.pulse`). Its silence is that of the machine, and regular enough to be judged by it;
an agent that is held up while that goes on has the whole limit.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ft_core.protocol.messages import NodeName, ProbeResult, Version

RETURN_GRACE = 0.3
"""Seconds that an agent whose connection broke has to come back before its node counts as lost."""
ASK = 1.0
"""Seconds between two rounds of questions about a node that is silent."""
ASK_AGAIN = 0.1
"""Seconds until others are asked again about a node whose connection broke: the kernel may close that a
moment before what listens."""
WITNESSES = 3
"""Nodes that are asked about one."""
PATIENCE = 3.0
"""Limits of silence after which a node that others reach is lost all the same: nobody can direct it."""

_BEATS = 10
"""After so many the rhythm of a node is known."""
_DEVIATIONS = 8.0
_LEAST = 0.5
"""The part of the limit of silence that is less than any node is suspected for. Machines stall for seconds,
and their past does not say when."""
_NEW = 0.1
"""The weight of one beat in the rhythm."""


class Rhythm:
    """How regularly a node is heard: mean and deviation of the time between two of its beats."""

    def __init__(self) -> None:
        self._count = 0
        self._last = self._mean = self._variance = 0.0

    def beat(self, now: float) -> None:
        """The node is heard: it lives."""
        if self._count:
            off = now - self._last - self._mean
            new = max(_NEW, 1 / self._count)
            self._mean += new * off
            self._variance = (1 - new) * (self._variance + new * off * off)
        self._count, self._last = self._count + 1, now

    def limit(self, bound: float) -> float:
        """Seconds of silence that are out of its rhythm; at most `bound`."""
        if self._count < _BEATS:
            return bound
        return min(bound, max(_LEAST * bound, self._mean + _DEVIATIONS * math.sqrt(self._variance)))


@dataclass
class NodeLiveness:
    """What is seen of one node, over one connection."""

    heard: float
    """When it was heard last."""
    gone_since: float | None = None
    """When its connection broke."""
    rhythm: Rhythm = field(default_factory=Rhythm)
    """The rhythm of the process beside its agent, or of the agent where there is none."""
    pulsed: float = -math.inf
    """When the process beside its agent said last that the machine lives."""
    pulses: int = -1
    """The number of that word."""
    answers: dict[NodeName, ProbeResult] = field(default_factory=dict)
    """Witness -> whether it reaches the node, since that was heard last or its connection broke."""
    counts_from: int = 0
    """The first round of questions whose answers are no older than that."""
    asked: float = -math.inf
    """When they were asked last."""
    leaves: bool = False
    """Whether it has said so: that its process ends is no news then, and why it does is known better."""

    def hear(self, now: float) -> None:
        """A message of it is here."""
        self.heard = now
        if self.answers:
            self.answers = {}

    def beat(self, now: float) -> None:
        """A heartbeat of the node's agent is here."""
        if self.pulsed == -math.inf:
            self.rhythm.beat(now)

    def pulse(self, now: float, number: int, stalled: float) -> None:
        """A pulse is here: the machine lives, and its agent did something `stalled` seconds ago; a repeated
        one says nothing new."""
        if number <= self.pulses:
            return
        self.pulses = number
        self.rhythm.beat(now)
        self.pulsed = now
        if now - stalled > self.heard:
            self.hear(now - stalled)

    def breaks(self, now: float, asked_next: int) -> None:
        """The node's connection has broken. What others saw before is of no use, also where they have yet to
        say it. `asked_next`: the number of the next round of questions."""
        self.gone_since, self.answers, self.counts_from = now, {}, asked_next

    def answered(self, witness: NodeName, reach: ProbeResult, asked: int) -> None:
        """A witness says whether it reaches the node, of which it was `asked` in that round."""
        if asked >= self.counts_from:
            self.answers = {**self.answers, witness: reach}

    @property
    def ended(self) -> list[NodeName]:
        """The nodes that have found that its process has ended: its connection broke, and after that nothing
        listened at its address, on a machine that is there to say so."""
        if self.gone_since is None:
            return []
        return sorted(name for name, reach in self.answers.items() if reach == "refused")

    def silence(self, now: float) -> float:
        """Seconds since it was heard last, or its connection broke."""
        return now - (self.heard if self.gone_since is None else self.gone_since)

    def lively(self, now: float, bound: float) -> bool:
        """Whether nothing is to be suspected: it is there, and was heard of late. `bound`: the limit of
        silence."""
        return self.gone_since is None and now - self.heard < bound * _LEAST / 2

    def doubtful(self, now: float, bound: float) -> bool:
        """Whether others are to be asked about it, now."""
        if self.gone_since is not None:
            return not self.leaves and now - self.asked >= ASK_AGAIN
        if self.lively(now, bound):
            return False
        return now - self.heard > self.rhythm.limit(bound) / 2 and now - self.asked >= ASK

    def lost(
        self, now: float, lived: float, bound: float, doubted: bool, witnesses: Collection[NodeName]
    ) -> str:
        """Why the node is lost, or nothing. `lived`: when its workers are known to have lived last. `bound`:
        the limit of silence. `doubted`: somebody else has seen a connection break. `witnesses`: those whose
        word counts."""
        # INV-8 (well)
        if self.gone_since is not None and self.leaves:
            return ""
        if self.gone_since is not None:
            if ended := self.ended:
                seen = f"(seen from {', '.join(ended)})"
                return f"its agent's connection broke, and nothing listens at its address any more {seen}"
            over = doubted or now - self.gone_since > RETURN_GRACE
            return "its agent's connection broke" if over else ""
        answers = {name: reach for name, reach in self.answers.items() if name in witnesses}
        reached = [name for name, reach in answers.items() if reach == "reached"]
        regular = self.rhythm.limit(bound)
        busy = now - self.pulsed < regular / 2
        limit = PATIENCE * bound if reached else bound if busy or not answers else regular
        if now - max(self.heard, lived) <= limit:
            return ""
        said = f"{'its agent has done nothing' if busy else 'no heartbeat'} for {limit:.1f} s"
        if reached:
            return f"{said}, though {', '.join(sorted(reached))} can reach it"
        return said + (f", and {', '.join(sorted(answers))} cannot reach it either" if answers else "")


@dataclass
class Steps:
    """Evidence that all workers live: who has finished a step proves that all were in it, some time
    before."""

    newest: Version = -1
    at: float = -math.inf
    """When it was heard of."""
    lived: float = -math.inf
    """The time until which the workers of all roles are known to have lived: when the step before was heard
    of."""

    def done(self, newest: Version, now: float) -> None:
        """Some role has this one."""
        if newest > self.newest:
            self.lived = self.at
            self.newest, self.at = newest, now


def chosen(node: NodeName, names: Sequence[NodeName], speaks: Callable[[NodeName], bool]) -> list[NodeName]:
    """The witnesses that are asked about `node`: the next ones after it that can be, so that not all ask the
    same. `names`: of all nodes, ascending."""
    found: list[NodeName] = []
    first = bisect(names, node)
    for at in range(first, first + len(names)):  # no further than it has to: there may be ten thousand
        name = names[at % len(names)]
        if name != node and speaks(name):
            found.append(name)
            if len(found) == WITNESSES:
                break
    return found
