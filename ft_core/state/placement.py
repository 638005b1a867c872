"""Which nodes keep copies of a segment, so that it survives the loss of failure domains.

Redundancy counts only across failure domains. With Megatron's rank order (tensor, then data, then pipeline
parallel) all data-parallel peers of a pipeline stage can share one node: what they hold in common is
redundant, yet dies with that node, so it needs replicas like unique state does.

Where domains have one level, as labels of one word have, copies go around a ring of roles; where racks are in
rows, or nodes in racks, they go where `ft_core.state.domains` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from ft_core.protocol.domains import SEPARATOR, domain_of
from ft_core.state.domains import NestedDomains
from ft_core.state.manifest import Segment

WARDS = 2
"""Nodes of each spare that it is to take over from at once. Each peer keeps the copies of one: a spare, which
trains nothing, has room and time for two."""


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
    def nested(self) -> NestedDomains | None:
        """The failure domains, if there are several levels of them."""
        if not any(SEPARATOR in domain for domain in self.domains.values()):
            return None
        found = NestedDomains(self.hosts, self.spares, self.domains)
        return found if found.levels > 1 else None

    @cached_property
    def hosts(self) -> list[str]:
        """The nodes with roles, in the order of these."""
        return list(dict.fromkeys(self.role_nodes[role] for role in sorted(self.role_nodes)))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The nodes with roles, each with a number, by their names."""
        return {node: at for at, node in enumerate(sorted(set(self.role_nodes.values())))}

    @cached_property
    def _guards(self) -> dict[str, str]:
        """By nodes with roles, where domains are nested: away from them as copies are, if possible."""
        nested, found = self.nested, dict[str, str]()
        assert nested is not None
        level = next(iter(nested.levels_apart(1)), nested.levels - 1)
        left, free = dict.fromkeys(sorted(self.hosts)), self.spares * WARDS
        for apart in (True, False):
            for spare in list(free):
                home = nested.at(spare, level) if apart else ""
                if (ward := next((n for n in left if nested.at(n, level) != home), None)) is not None:
                    del left[ward]
                    free.remove(spare)
                    found[ward] = spare
        return found

    def guard(self, node: str) -> str | None:
        """The spare that is to take over from a node with roles at once; None if it has none."""
        if not self.guarded:
            return None  # without all nodes having been put in order, for each snapshot that is sent
        if self.nested is not None:
            return self._guards.get(node)
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

    Where domains are nested, that is so at the level of each copy (`NestedDomains.targets`), and `ring` does
    not matter.
    """
    if places.nested is not None:
        return _apart(segment, places, places.nested, replicas)
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


def _apart(segment: Segment, places: Places, nested: NestedDomains, replicas: int) -> list[str]:
    """`replica_nodes` for nested domains."""
    home = places.role_nodes[sender(segment, places.role_nodes)]
    own = dict.fromkeys(places.role_nodes[h] for h in segment.holders if h in places.role_nodes)
    chosen: list[str] = []
    targets = nested.targets(home, replicas)
    keepers = [target.node for target in targets]
    if targets and (guard := places.guard(home)) is not None:
        keepers.insert(0, guard)
    for wanted, (_, level) in enumerate(targets, start=2):
        covered = {nested.at(node, level) for node in (*own, *chosen)}
        # The sender and the targets up to this one are in so many domains: there are always enough.
        for node in keepers:
            if len(covered) < wanted and (domain := nested.at(node, level)) not in covered:
                covered.add(domain)
                chosen.append(node)
    return chosen


def all_left(places: Places, gone: Collection[str], replicas: int) -> bool:
    """Whether all that was copied is on other nodes, too, if those in `gone` are lost at once."""
    if places.nested is None:
        return len({domain_of(node, places.domains) for node in gone}) <= replicas
    lost = {node: role for role, node in places.role_nodes.items() if node in gone}
    return all(
        any(node not in gone for node in replica_nodes(Segment((role,), ()), places, replicas))
        for role in lost.values()
    )


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
