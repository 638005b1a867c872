"""What would be lost with too few failure domains: parts of the state with fewer whole copies than there
should be. What is known is gathered in the event loop; what follows from it is found out elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.compact import Segments
from ft_core.protocol.groups import roles_in
from ft_core.protocol.messages import RoleBeat


class Present(NamedTuple):
    """A live node: its roles, and the copies that it keeps for others."""

    name: str
    domain: str
    roles: Mapping[int, RoleBeat]
    replicas: Mapping[str, list[int]]


@dataclass(frozen=True)
class Loss:
    """What would follow if a node died."""

    roles: list[int]
    """The roles that the node plays."""
    alone: int
    """Parts of the state of which there is a copy there, and nowhere else."""
    version: int | None
    """The newest of which others have all that its roles have alone. None: there are no roles, or not all is
    anywhere else."""
    redone: int | None
    """Steps that it has done after that one."""
    below: int
    """Parts of the state that would have too few copies, and have enough now."""


Whole = tuple[str, list[int], list[str]]
"""What is known of a node: its domain, its roles that have what counts, and the segments of which it keeps
that."""


@dataclass
class Last:
    """What was counted last, and of what. Within an epoch hardly anything of that changes: versions get
    newer, and what counts is those that the epoch began with."""

    whole: list[Whole] = field(default_factory=list)
    places: Mapping[int, str] | None = None
    catalogue: Mapping[int, Segments] | None = None
    replicas: int = 0
    below: int = 0


@dataclass(frozen=True)
class ClusterHoldings:
    """A snapshot of who holds what. None of it changes."""

    replicas: int
    """k: failure domains that may be lost."""
    version: int
    """What the epoch under way went on from."""
    nodes: list[Present]
    places: Mapping[int, str]
    catalogue: Mapping[int, Segments]
    last: Last = field(default_factory=Last, repr=False, compare=False)
    """What was found last, for whoever counts again and again."""

    @cached_property
    def below(self) -> int:
        """Segments of roles that take part of which fewer than k + 1 domains have what the epoch began with,
        or anything newer: no step is finished before there are all copies of the one before."""
        whole, last = [self._whole(node) for node in self.nodes], self.last
        same = self.places is last.places and self.catalogue is last.catalogue
        if not (same and self.replicas == last.replicas and whole == last.whole):
            last.below = self._below(whole)
            last.whole, last.places = whole, self.places
            last.catalogue, last.replicas = self.catalogue, self.replicas
        return last.below

    def _whole(self, node: Present) -> Whole:
        least = self.version
        roles = [role for role, beat in node.roles.items() if beat.held and max(beat.held) >= least]
        kept = [name for name, versions in node.replicas.items() if versions and max(versions) >= least]
        return node.domain, roles, kept

    def _below(self, whole: list[Whole]) -> int:
        own: dict[int, str] = {}
        copies: dict[str, str] = {}
        more: dict[str, set[str]] = {}
        for domain, roles, kept in whole:
            own |= dict.fromkeys(roles, domain)
            for segment in kept:
                if copies.setdefault(segment, domain) is not domain:
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

    def without(self, name: str) -> Loss:
        """What would follow if that node died now."""
        roles = sorted(role for role, node in self.places.items() if node == name)
        others = [node for node in self.nodes if node.name != name]
        own = next((node.roles for node in self.nodes if node.name == name), {})
        by_role = {role: node.roles[role].held for node in others for role in node.roles} if roles else {}
        newest = {segment: -1 for role in roles for segment in self.catalogue.get(role, ())}
        for node in others:
            for segment in newest.keys() & node.replicas.keys():
                newest[segment] = max(newest[segment], *node.replicas[segment], -1)
        versions = []
        for role in roles:
            for segment, holders in self.catalogue.get(role, {}).items():
                for other in chain.from_iterable(roles_in(holders)):
                    newest[segment] = max(newest[segment], *by_role.get(other, ()), -1)
            found = [newest[segment] for segment in self.catalogue.get(role, ())]
            # What others say is not of the same moment; it knows itself what all copies are there of.
            versions.append(max(min(found, default=-1), own[role].committed if role in own else -1))
        alone = sum(version < 0 for version in newest.values())
        version = min(versions, default=-1) if not alone else -1
        step = max((own[role].step for role in roles if role in own), default=version)
        return Loss(
            roles,
            alone,
            version if version >= 0 else None,
            max(0, step - version) if version >= 0 else None,
            max(0, replace(self, nodes=others, last=Last()).below - self.below),
        )

    def _enough(self, holders: str, others: set[str], own: Mapping[int, str]) -> bool:
        """Whether enough domains have a segment. `others`: domains that have copies beside the holders'
        own."""
        domains = set(others)
        for role in chain.from_iterable(roles_in(holders)):
            if len(domains) > self.replicas:
                break
            if (domain := own.get(role)) is not None:
                domains.add(domain)
        return len(domains) > self.replicas


def held(cluster: ClusterState, last: Last) -> ClusterHoldings:
    """What is held now."""
    plan = cluster.current_plan
    version = (cluster.versions.initial or 0) if plan.version is None else plan.version
    return ClusterHoldings(
        cluster.settings.replicas, version, present(cluster), plan.roles, cluster.catalogue.now(), last
    )


def present(cluster: ClusterState) -> list[Present]:
    """The live nodes."""
    return [
        Present(node.name, node.hello.domain, node.beats, node.replicas) for node in cluster.nodes.values()
    ]
