"""Which nodes keep copies of a segment, so that it survives the loss of failure domains.

Redundancy counts only across failure domains. With Megatron's rank order (tensor, then data, then pipeline
parallel) all data-parallel peers of a pipeline stage can share one node: what they hold in common is
redundant, yet dies with that node, so it needs replicas like unique state does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from ft_core.state.manifest import Segment

WARDS = 2
"""Nodes of each spare that it is to take over from at once. Each peer keeps the copies of one: a spare, which
trains nothing, has room and time for two."""


def domain_of(node: str, domains: Mapping[str, str]) -> str:
    """The failure domain of `node`: its label, or the node itself where it has none."""
    return domains.get(node) or node


class Ring:
    """Roles in an order that closes, such as the data-parallel peers of one. Made once for all of them that
    send copies: what it must know of whole failure domains it finds out once."""

    def __init__(
        self, roles: Sequence[int], role_nodes: Mapping[int, str], domains: Mapping[str, str]
    ) -> None:
        self._roles, self._nodes, self._domains = roles, role_nodes, domains

    def from_behind(self, source: int) -> Iterator[tuple[str, str]]:
        """Nodes of the roles that follow `source`, once around the ring, with their failure domains: the
        first of each run of roles in one domain."""
        roles, count = self._roles, len(self._roles)
        if source in roles:
            start = roles.index(source) + 1
        else:
            start = next((i for i, r in enumerate(roles) if r > source), 0)
        at = start
        while at < start + count:
            node = self._nodes.get(roles[at % count])
            if node is None:
                at += 1
                continue
            domain = domain_of(node, self._domains)
            yield node, domain
            at += 1 if domain == node else self._runs[at % count]

    def opposite(self, home: str, domain: str) -> str | None:
        """The node of a failure domain that stands where `home` stands in its own; None where no role of the
        ring is on `home`."""
        members, places = self._members
        return members[domain][places[home] % len(members[domain])] if home in places else None

    @cached_property
    def _runs(self) -> list[int]:
        """At each role, how many from it on to the ring's last one are in the same failure domain."""
        nodes = [self._nodes.get(role) for role in self._roles]
        labels = [None if node is None else domain_of(node, self._domains) for node in nodes]
        runs = [1] * len(labels)
        for at in range(len(labels) - 2, -1, -1):
            if labels[at] == labels[at + 1]:
                runs[at] += runs[at + 1]
        return runs

    @cached_property
    def _members(self) -> tuple[dict[str, list[str]], dict[str, int]]:
        """The nodes of each failure domain in the ring's order, and the place of each node among them."""
        members: dict[str, list[str]] = {}
        places: dict[str, int] = {}
        for role in self._roles:
            if (node := self._nodes.get(role)) is not None and node not in places:
                of_domain = members.setdefault(domain_of(node, self._domains), [])
                places[node] = len(of_domain)
                of_domain.append(node)
        return members, places


class Places:
    """Where the roles of a job are. Made once for all segments whose copies are placed."""

    def __init__(
        self,
        role_nodes: Mapping[int, str],
        domains: Mapping[str, str],
        spares: Iterable[str] = (),
        guarded: bool = False,
    ) -> None:
        """`spares`: nodes without a role, which may keep copies as well. `guarded`: they do so first, for the
        nodes that they guard."""
        self.role_nodes, self.domains = role_nodes, domains
        self.spares = sorted(spares)
        self.guarded = guarded

    def ring(self, roles: Sequence[int]) -> Ring:
        """The ring of some of the roles."""
        return Ring(roles, self.role_nodes, self.domains)

    @cached_property
    def everybody(self) -> Ring:
        """All roles."""
        return self.ring(sorted(self.role_nodes))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The nodes with roles, each with a number, by their names."""
        return {node: at for at, node in enumerate(sorted(set(self.role_nodes.values())))}

    def guard(self, node: str) -> str | None:
        """The spare that is to take over from a node with roles at once; None if it has none."""
        if not self.guarded:
            return None  # without all nodes having been put in order, for each snapshot that is sent
        at, count = self.numbers[node], len(self.spares)
        return self.spares[at % count] if at < WARDS * count else None

    def wards(self, spare: str) -> list[str]:
        """Nodes with roles that this spare guards."""
        return [node for node in self.numbers if self.guard(node) == spare]


def sender(segment: Segment, role_nodes: Mapping[int, str]) -> int:
    """The role whose agent sends the segment's replicas: the lowest holder that is placed on a node.

    Raises ValueError where no holder is placed.
    """
    return min(h for h in segment.holders if h in role_nodes)


def replica_nodes(segment: Segment, places: Places, replicas: int, ring: Ring | None = None) -> list[str]:
    """Nodes that must keep a copy, beyond the holders' own, for `replicas` lost domains to be survived.

    The copies (the holders' included) are in `replicas + 1` distinct domains, or in as many as there are:
    `survives` tells. Nodes that host roles of `ring` (the sender's data-parallel peers in order:
    FFTrainer's neighbouring redundancy, section 4.2) come first, starting after the sender, then those of
    all other roles in cyclic order. In a domain of several nodes the one is taken that stands where the
    sender's node stands in its own domain, so that racks of equal size mirror each other instead of loading
    their first node.

    Where these are in too few domains, the spares keep copies as well: all that a node sends goes to the same
    ones, so that one of them has what its roles need to go on there. A node's guard (`Places.guard`) comes
    before all others.
    """
    role_nodes, domains = places.role_nodes, places.domains
    source = sender(segment, role_nodes)
    home = role_nodes[source]
    covered = _domains(segment, role_nodes, domains)
    chosen: list[str] = []
    guard = places.guard(home) if len(covered) <= replicas else None
    if guard is not None and domain_of(guard, domains) not in covered:
        covered.add(domain_of(guard, domains))
        chosen.append(guard)
    if len(covered) <= replicas and ring is not None:
        chosen += _choose(source, home, ring, covered, replicas + 1)
    if len(covered) <= replicas:
        chosen += _choose(source, home, places.everybody, covered, replicas + 1)
    if len(covered) <= replicas and (others := places.spares):
        at = places.numbers[home] % len(others)
        for node in others[at:] + others[:at]:
            if len(covered) <= replicas and domain_of(node, domains) not in covered:
                covered.add(domain_of(node, domains))
                chosen.append(node)
    return chosen


def spares_of(nodes: Iterable[str], role_nodes: Mapping[int, str]) -> list[str]:
    """Those of `nodes` that play no role."""
    return sorted(set(nodes) - set(role_nodes.values()))


def survives(
    segment: Segment, role_nodes: Mapping[int, str], domains: Mapping[str, str], nodes: Iterable[str]
) -> int:
    """How many failure domains, whichever, may be lost while a holder or replica remains."""
    covered = _domains(segment, role_nodes, domains) | {domain_of(n, domains) for n in nodes}
    return len(covered) - 1


def _domains(segment: Segment, role_nodes: Mapping[int, str], domains: Mapping[str, str]) -> set[str]:
    return {domain_of(role_nodes[h], domains) for h in segment.holders if h in role_nodes}


def _choose(source: int, home: str, ring: Ring, covered: set[str], wanted: int) -> Iterator[str]:
    """Yield one node per domain not yet in `covered`, adding the domain to it, until `wanted` are covered."""
    if len(covered) >= wanted:
        return
    for node, domain in ring.from_behind(source):
        if domain in covered:
            continue
        covered.add(domain)
        yield node if domain == node else ring.opposite(home, domain) or node
        if len(covered) >= wanted:
            return
