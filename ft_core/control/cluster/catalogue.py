"""What the state of each role consists of: its segments and their holders.

It is kept beyond the life of those who told of it: what is lost without a trace must still be missed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ft_core.control.cluster.node import Node
from ft_core.control.decide import compact
from ft_core.protocol.messages import Catalogue


class SegmentCatalogue:
    """The segments of all roles of one job."""

    def __init__(self) -> None:
        self.by_role: dict[int, compact.Segments] = {}
        """Role -> its segments and their holders, to be read only."""
        self._packed: Catalogue | None = None
        """All of it in the form that plans have it, once it was asked for."""
        self._shown: dict[int, compact.Segments] | None = None
        """A copy that stays as it is; None until it is asked for."""

    def of(self, role: int) -> compact.Segments:
        """The segments of a role, and their holders; none of a role that has not said."""
        return self.by_role.get(role, {})

    def learn(self, role: int, segments: compact.Segments) -> None:
        """Note what a role's state consists of."""
        if self.by_role.get(role) != segments:
            self.by_role[role] = segments
            self._packed = self._shown = None

    def add(self, role: int, segments: compact.Segments) -> None:
        """Note a part of what a role's state consists of."""
        self.learn(role, {**self.of(role), **segments})

    def take(self, catalogue: Catalogue) -> None:
        """Add what another controller's plan knows."""
        self.by_role = {**self.by_role, **compact.expanded(catalogue)}
        self._packed = self._shown = None

    def forget(self) -> None:
        """The job starts over."""
        self.by_role = {}
        self._packed = self._shown = None

    def fill(self, roles: Collection[int], nodes: Iterable[Node]) -> None:
        """Complete it for `roles`, where what they said of their segments was lost with their nodes or with a
        controller: what others hold for them names the segments."""
        if not roles:
            return
        known: compact.Segments = {}
        for node in nodes:
            known |= node.holdings.segments
        wanted = set(roles)
        for segment, holders in known.items():
            for role in wanted.intersection(compact.all_in(holders)):
                if self.of(role).get(segment) != holders:
                    self.add(role, {segment: holders})

    def packed(self) -> Catalogue:
        """All of it, as plans have it."""
        if self._packed is None:
            self._packed = compact.catalogue(self.by_role)
        return self._packed

    def now(self) -> Mapping[int, compact.Segments]:
        """All of it, as it stays: the same object for as long as nothing new is learnt."""
        if self._shown is None:
            self._shown = dict(self.by_role)
        return self._shown

    def copies(self, nodes: Iterable[Node], roles: Collection[int]) -> dict[int, list[str]]:
        """For each of `roles`, those of `nodes` that keep copies for others, once for each of the role's
        segments."""
        wanted = {segment for role in roles for segment in self.of(role)}
        held: dict[str, list[str]] = {}
        for node in nodes:
            for segment in wanted.intersection(node.holdings.replicas):
                held.setdefault(segment, []).append(node.name)
        return {role: [name for s in self.of(role) for name in held.get(s, ())] for role in roles}
