"""The controller's view of the replica groups: which can leave, and which can come back."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ft_core.control.decide import compact, role_placement
from ft_core.elastic.rules import AHEAD, Membership, Start
from ft_core.protocol.messages import (
    GroupFamily,
    Redundancy,
    ReplicaGroup,
    ReplicaGroups,
)

Places = dict[int, str]
"""Role -> node."""


def by_node(places: Places) -> dict[str, list[int]]:
    """Node -> its roles, ascending."""
    found: dict[str, list[int]] = {}
    for role, node in sorted(places.items()):
        found.setdefault(node, []).append(role)
    return found


class Groups:
    """What the roles have said of the groups they belong to, and who takes part since when.

    Soft state like all of the controller's: it travels in the plan.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._of: dict[int, int] = {}
        self._compact: list[GroupFamily] | None = None
        """Role -> group in the form that plans have it, once it was asked for."""
        self._by_group: dict[int, list[int]] | None = None
        """Group -> its roles, once it was asked for."""
        self._alike: list[tuple[int, ...]] | None = None
        """Roles in the same place of their groups, once they were asked for."""
        self.redundancy = Redundancy.SHARDED
        self.membership = Membership(0)
        self.withdrawn: set[int] = set()
        """Roles that are not in the next epoch, and whose workers are ended: so that they can fill the holes
        of another group, as their node goes, or as they came back too late."""

    def register(self, role: int, group: ReplicaGroup) -> None:
        """A role says which group it belongs to."""
        if self._of.get(role) != group.index:
            self._of[role], self._compact, self._by_group, self._alike = group.index, None, None, None
        self.redundancy = group.redundancy
        if not self.membership.groups:
            self.membership = self._start.membership(group.groups)
            for missing in set(range(self._start.roles)) - set(self._start.present):
                self._of.setdefault(missing, self._start.group(missing, group.groups))

    def value(self) -> ReplicaGroups:
        """What a successor of the controller needs to know of the groups."""
        if self._compact is None:
            self._compact = compact.groups(self._of)
        return ReplicaGroups(of=self._compact, redundancy=self.redundancy, membership=self.membership.value())

    def restore(self, found: ReplicaGroups) -> None:
        """Take over what `value` of a former controller has said."""
        self._of, self._compact, self._by_group = compact.group_of(found.of), found.of, None
        self._alike = None
        self.redundancy = found.redundancy
        self.membership = Membership.of(found.membership)

    def forget(self) -> None:
        """The job starts over, with the groups that take part now."""
        there = self.membership.taking_part(1 << 62)
        self.membership = Membership(self.membership.groups).changed(-AHEAD, there)

    @property
    def known(self) -> bool:
        """Whether all roles have said which group they belong to."""
        return len(self._of) == self._start.roles

    def of(self, roles: Collection[int]) -> list[int]:
        """The groups that `roles` belong to."""
        return sorted(self._groups(roles))

    def _groups(self, roles: Collection[int]) -> set[int]:
        return set(self._of.values()) if len(roles) == len(self._of) else {self._of[role] for role in roles}

    def roles(self, groups: Collection[int]) -> list[int]:
        """The roles of `groups`."""
        members = self._members()
        return sorted(role for group in groups for role in members[group])

    def _members(self) -> dict[int, list[int]]:
        """Group -> its roles, ascending."""
        if self._by_group is None:
            self._by_group = {}
            for role, group in sorted(self._of.items()):
                self._by_group.setdefault(group, []).append(role)
        return self._by_group

    def alike(self) -> Sequence[Sequence[int]]:
        """The roles in the same place of each group, by place; empty while that is not known."""
        if not self.known:
            return ()
        if self._alike is None:
            members = self._members()
            self._alike = list(zip(*(members[group] for group in sorted(members)), strict=False))
        return self._alike

    def changed(self, version: int | None, roles: Collection[int]) -> None:
        """An epoch starts from `version` with `roles`."""
        if self.known:
            self.membership = self.membership.changed(version or 0, self.of(roles))

    def without(self, placed: Places, unplaced: Collection[int]) -> tuple[Places, str]:
        """What is left when the groups of the `unplaced` roles leave: empty, with the reason, if they cannot.

        They can where other groups remain whole, and hold all the state that those who leave had.
        """
        if not self.known:
            return {}, "training has not begun"
        if self.redundancy is Redundancy.SHARDED:
            return {}, "the replica groups share one sharded state"
        gone = set(self.of(unplaced))
        left = {role: node for role, node in placed.items() if self._of[role] not in gone}
        return left, "" if left else "no replica group is whole"

    def counterparts(self, roles: Collection[int], present: Collection[int]) -> dict[int, int]:
        """For each of `roles`, which are away, the role in the same place of the next replica group that is
        there.

        Groups that are away have different counterparts as far as there are enough: they may adopt a shard.
        """
        there, instead = self.of(present), {}
        left = list(there)
        for away in sorted(set(range(self.membership.groups)) - set(there)):
            left = left or list(there)
            at = bisect(left, away)
            instead[away] = left.pop(at if at < len(left) else 0)
        members = self._members()
        counterpart = {
            role: other
            for group in sorted(self._groups(roles))
            for role, other in zip(members[group], members[instead[group]], strict=True)
        }
        return {role: counterpart[role] for role in roles}

    def absent(self, present: Collection[int]) -> dict[int, int]:
        """The roles that are away, each with its counterpart among those who are there."""
        if len(present) == self._start.roles:
            return {}
        away = sorted(set(range(self._start.roles)) - set(present))
        if self.known:
            return self.counterparts(away, present)
        return {role: self._start.counterpart(role) for role in away}

    def adopted(self, present: Collection[int]) -> dict[int, int]:
        """The roles that are away whose counterpart holds what they had alone, with that counterpart."""
        return self.absent(present) if self.adopting else {}

    @property
    def adopting(self) -> bool:
        """Whether who stands for others holds what they had alone."""
        return self.redundancy is not Redundancy.REPLICATED

    def held_alone(self, role: int, segments: compact.Segments, present: Collection[int]) -> set[str]:
        """The segments of a role that is away, among these (with their holders), that nobody who is there
        has."""
        return {
            segment
            for segment, holders in segments.items()
            if next(compact.all_in(holders)) == role
            and not any(held in present for held in compact.all_in(holders))
        }

    def to_combine(self, placed: Places, unplaced: Collection[int]) -> list[int]:
        """Where no group is whole: the roles whose nodes shall fill the holes of the one that lacks least.

        Empty if that would not do.
        """
        if not self.known or self.redundancy is Redundancy.SHARDED:
            return []
        lacking = Counter(self._of[role] for role in unplaced)
        keep = min(lacking, key=lambda group: (lacking[group], group))
        others = [role for role in placed if self._of[role] != keep]
        return others if len(others) >= lacking[keep] else []

    @property
    def size(self) -> int:
        """Roles of a replica group; 0 while that is not known."""
        return self._start.roles // self.membership.groups if self.known else 0

    def returning(
        self, placed: Places, idle: Mapping[str, int], capacity: int, avoided: Collection[str] = ()
    ) -> Places:
        """The places of the groups that can come back: those for which there are idle workers enough."""
        found: Places = {}
        if not self.known:
            return found
        room, members = role_placement.PlacementCapacity(placed, idle, capacity, avoided), self._members()
        away = set(range(self._start.roles)) - placed.keys() - self.withdrawn
        for group in self.of(away):
            roles = [role for role in members[group] if role in away]
            if len(roles) <= room.left:
                found |= room.take(roles)
        return found
