"""What would be lost with too few failure domains: parts of the state with fewer whole copies than there
should be. What is known is gathered in the event loop; what follows from it is found out elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from ft_core.control.compact import Segments
from ft_core.control.facts import Facts
from ft_core.protocol.groups import roles_in
from ft_core.protocol.messages import RoleBeat


@dataclass(frozen=True)
class Held:
    """Who holds what, at a moment. None of it changes."""

    replicas: int
    """k: failure domains that may be lost."""
    version: int
    """What the epoch under way went on from."""
    nodes: list[tuple[str, Mapping[int, RoleBeat], Mapping[str, list[int]]]]
    """Of each live node its domain, its roles, and the copies that it keeps for others."""
    places: Mapping[int, str]
    catalogue: Mapping[int, Segments]

    def below(self) -> int:
        """Segments of roles that take part of which fewer than k + 1 domains have what the epoch began with,
        or anything newer: no step is finished before there are all copies of the one before."""
        least = self.version
        own: dict[int, str] = {}
        copies: dict[str, str] = {}
        more: dict[str, set[str]] = {}
        for domain, roles, replicas in self.nodes:
            own |= {role: domain for role, beat in roles.items() if beat.held and max(beat.held) >= least}
            for segment, versions in replicas.items():
                if versions and max(versions) >= least and copies.setdefault(segment, domain) is not domain:
                    more.setdefault(segment, {copies[segment]}).add(domain)
        below, seen = 0, set[str]()
        for role in self.catalogue.keys() & self.places:
            for segment, holders in self.catalogue[role].items():
                copy = copies.get(segment)
                if self.replicas == 1 and copy is not None and own.get(role, copy) != copy:
                    continue  # as nearly all are: 100,000 of them are looked at
                if segment not in seen:
                    seen.add(segment)
                    others = more.get(segment) or ({copy} if copy is not None else set())
                    below += not self._enough(holders, others, own)
        return below

    def _enough(self, holders: str, others: set[str], own: Mapping[int, str]) -> bool:
        """`others`: domains that have copies beside the holders' own."""
        domains = set(others)
        for role in chain.from_iterable(roles_in(holders)):
            if len(domains) > self.replicas:
                break
            if (domain := own.get(role)) is not None:
                domains.add(domain)
        return len(domains) > self.replicas


def held(facts: Facts) -> Held:
    """As of now."""
    plan = facts.begun
    version = (facts.initial or 0) if plan.version is None else plan.version
    nodes = [(node.hello.domain, node.beats, node.replicas) for node in facts.nodes.values()]
    return Held(facts.settings.replicas, version, nodes, plan.roles, dict(facts.catalogue))
