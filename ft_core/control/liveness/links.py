"""Links that are broken between two live nodes: pure, from what nodes say of each other.

Workers, or agents, see connections break, nobody has died, and no step finishes any more. Then the nodes
are asked which others they reach. Two that are heard and do not reach each other, one way or the other,
twice in a row, have a broken link between them, and one end of it is replaced. If all reach each other, what
broke is made anew in another epoch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ft_core.protocol.messages import NodeName, ProbeResult

SETTLE = 1.0
"""Seconds after connections broke in which who has died is noticed."""
ROUND = 2.5
"""Seconds of a round of questions; a node has less to answer another."""
ROUNDS = 2
"""How many rounds of answers, one after the other, must be the same."""
ALL = 8
"""Nodes of which each is asked about each. Of more, only those that have seen connections break."""

Pair = tuple[NodeName, NodeName]


@dataclass(frozen=True)
class Broken:
    """A link, and its end that is to be replaced."""

    ends: Pair
    replaced: NodeName


class Links:
    """The links between nodes in one epoch."""

    def __init__(self) -> None:
        self._due: float | None = None
        """When it is looked again; None: nothing is suspected."""
        self._version = -2
        """The newest step that was finished when it was looked last."""
        self._rounds = 0
        self._asked: dict[NodeName, set[NodeName]] = {}
        """Witness -> the nodes about which it has yet to answer in this round."""
        self._broken: set[Pair] = set()
        """Pairs of nodes that did not reach each other in this round."""
        self._always: set[Pair] = set()
        """Pairs of nodes that have failed to reach each other in every round before this one."""

    def suspect(self, now: float, training: bool) -> None:
        """Somebody has seen connections break. `training`: steps may go on all the same."""
        if self._due is not None:
            return
        self._due = now + SETTLE if training else now
        if not training:
            self._version = sys.maxsize  # no step is to be waited for

    @property
    def suspected(self) -> bool:
        """Whether it is being found out whether a link is broken."""
        return self._due is not None

    def answered(self, witness: NodeName, reach: dict[NodeName, ProbeResult]) -> None:
        """A node says whom it reaches."""
        for name, found in reach.items():
            if name in self._asked.get(witness, ()):
                self._asked[witness].discard(name)
                if found != "reached":
                    self._broken.add((min(witness, name), max(witness, name)))

    def tick(
        self, nodes: Collection[NodeName], seers: Collection[NodeName], sound: bool, version: int, now: float
    ) -> dict[NodeName, set[NodeName]]:
        """Which nodes to ask about which others, if a round begins. `nodes`: those of the plan. `seers`: who
        has seen connections break. `sound`: whether all of `nodes` are heard. `version`: the newest step that
        was finished."""
        answered = bool(self._asked) and not any(self._asked.values())
        if self._due is None or (now < self._due and not answered):
            return {}
        self._due = now + ROUND
        if version > self._version or not sound:  # training goes on; or first it must be clear who lives
            self._version, self._rounds, self._asked = version, 0, {}
            return {}
        if answered:
            self._always = self._broken & self._always if self._rounds else self._broken
            self._rounds += 1
        few = set(nodes) if len(nodes) <= ALL else set(sorted(set(seers) & set(nodes))[:ALL])
        asked = {name: (set(nodes) if name in few else few) - {name} for name in sorted(nodes)}
        self._asked, self._broken = {name: set(about) for name, about in asked.items()}, set()
        return asked

    def again(self, now: float) -> None:
        """What was found cannot be mended now: find out anew whether it is still so."""
        self._due, self._rounds, self._asked = now + ROUND, 0, {}

    @property
    def over(self) -> bool:
        """Whether it is known what there is to know."""
        return self._rounds >= ROUNDS

    def found(
        self,
        nodes: Collection[NodeName],
        strikes: Callable[[NodeName], float],
        place: Callable[[NodeName], int],
    ) -> Broken | None:
        """A broken link between two of these nodes, once all is known. Replaced is the end that fewer others
        reach, else the one that has failed more often (`strikes`), else the one whose `place` is higher."""
        always = [pair for pair in self._always if set(pair) <= set(nodes)]
        degree = Counter(name for pair in always for name in pair)
        if not degree:
            return None
        replaced = max(degree, key=lambda name: (degree[name], strikes(name), place(name)))
        pairs = (pair for pair in always if replaced in pair)
        ends = min(pairs, key=lambda pair: (sorted(map(place, pair)), pair))  # rather of two that train
        return Broken(ends, replaced)
