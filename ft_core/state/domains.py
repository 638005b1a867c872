"""Failure domains within each other: where copies go where nodes say their rack, and its switch.

A domain is text with the widest level first: `switch-2/rack-7/node-13`. One word is one level. Nodes are
lost together at any level, more seldom the wider it is, so a copy goes to another domain of the widest level
at which all nodes have a partner and none keeps much more than it sends. Where there is one rack only, that
is the level of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from ft_core.protocol.domains import domain_of, within

MOST = 2
"""How many times what a node sends it may have to keep, for copies to be further apart."""


class Target(NamedTuple):
    """Who keeps a copy of what a node sends."""

    node: str
    level: int
    """It is in another domain at this level than the sender, and than all targets before it."""


class NestedDomains:
    """Those of a job's nodes, and which node keeps copies for which: the same wherever it is worked out."""

    def __init__(self, hosts: Sequence[str], spares: Sequence[str], domains: Mapping[str, str]) -> None:
        """`hosts`: nodes with roles, in the order of these: it stays when another node takes the place of
        one, and so does who keeps whose copies. `spares`: the others, which keep some where those cannot."""
        self._hosts, self._spares = hosts, spares
        self._within = {node: within(domain_of(node, domains)) for node in (*hosts, *spares)}
        self.levels = max(map(len, self._within.values()), default=1)
        self._rounds: dict[int, list[tuple[int, dict[str, str]]]] = {}
        """By the number of copies that are asked for."""

    def at(self, node: str, level: int) -> str:
        """The domain of a node at a level, 0 being the widest. One without so many levels ends before."""
        found = self._within[node]
        return found[min(level, len(found) - 1)]

    def domains(self, level: int) -> dict[str, list[str]]:
        """Those of a level, each with its nodes that have roles."""
        found: dict[str, list[str]] = {}
        for node in self._hosts:
            found.setdefault(self.at(node, level), []).append(node)
        return found

    def targets(self, node: str, copies: int) -> list[Target]:
        """Who keeps the copies of what a node with roles sends: so many, or as many as there can be."""
        if (rounds := self._rounds.get(copies)) is None:
            rounds = self._rounds[copies] = list(self._deal(copies))
        return [Target(found[node], level) for level, found in rounds]

    def levels_apart(self, copies: int) -> list[int]:
        """At which level each copy is away from the sender and from those before it."""
        return [level for _, level in self.targets(self._hosts[0], copies)] if self._hosts else []

    def _deal(self, copies: int) -> Iterator[tuple[int, dict[str, str]]]:
        """For one copy after the other: the level, and who keeps that of each node."""
        kept: Counter[str] = Counter()
        before: list[dict[str, str]] = []
        for number in range(1, copies + 1):
            found = self._level(number)
            if found is None:
                return
            level, keepers = found
            # Where domains have their nodes one after the other, and none more than its share of all, whoever
            # is so many places on is in another one.
            shift = number * len(self._hosts) // (copies + 1)
            before.append(self._round(level, keepers, shift, before, kept))
            yield level, before[-1]

    def _level(self, number: int) -> tuple[int, Sequence[str]] | None:
        """The widest level at which all nodes can have so many copies apart, and who may keep them."""
        count = len(self._hosts)
        for level in range(self.levels):
            sent = Counter(self.at(node, level) for node in self._hosts)
            for keepers in (self._hosts, [*self._hosts, *self._spares]):
                room = Counter(self.at(node, level) for node in keepers)
                if level == self.levels - 1:
                    if len(room) > number:
                        return level, keepers
                    continue
                # Each domain has what is sent from it, or keeps it, but nothing twice.
                most = (min(count, sent[domain] + MOST * number * nodes) for domain, nodes in room.items())
                if sum(most) >= count * (number + 1):
                    return level, keepers
        return None

    def _round(
        self,
        level: int,
        keepers: Sequence[str],
        shift: int,
        before: Sequence[Mapping[str, str]],
        kept: Counter[str],
    ) -> dict[str, str]:
        """One copy of each node. `before`: where those before it are; `kept`: how many each node keeps."""
        hosts, found = self._hosts, dict[str, str]()
        late: list[tuple[str, set[str]]] = []
        for at, node in enumerate(hosts):
            other = hosts[(at + shift) % len(hosts)]
            taken = {self.at(each, level) for each in (node, *(targets[node] for targets in before))}
            if self.at(other, level) in taken:
                late.append((node, taken))
            else:
                found[node] = other
                kept[other] += 1
        if not late:
            return found
        queues: dict[str, list[tuple[int, int]]] = {}
        for at, node in enumerate(keepers):
            queues.setdefault(self.at(node, level), []).append((kept[node], at))
        for queue in queues.values():
            heapify(queue)
        heads = [(queue[0], domain) for domain, queue in queues.items()]
        heapify(heads)
        for node, taken in late:  # to whoever keeps least, elsewhere
            aside = []
            while heads[0][1] in taken:
                aside.append(heappop(heads))
            (load, at), domain = heads[0]
            heapreplace(queues[domain], (load + 1, at))
            heapreplace(heads, (queues[domain][0], domain))
            for each in aside:
                heappush(heads, each)
            found[node] = keepers[at]
            kept[keepers[at]] += 1
        return found
