"""The controller's view of the replica groups: which can leave, and which can come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from ft_core.control import compact, decision
from ft_core.elastic.rules import AHEAD, Membership, Start
from ft_core.protocol.messages import (
    GroupFamily,
    MembershipChanges,
    Redundancy,
    ReplicaGroup,
    ReplicaGroups,
)

Places = dict[int, str]
"""Role -> node."""


class Groups:
    """What the roles have said of the groups they belong to, and who takes part since when.

    Soft state like all of the controller's: it travels in the plan.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._of: dict[int, int] = {}
        self._compact: list[GroupFamily] | None = None
        """The same for plans, once it was asked for."""
        self.redundancy = Redundancy.SHARDED
        self.membership = Membership(0)
        self.withdrawn: set[int] = set()
        """Roles whose workers are being ended, so that they can fill the holes of another group."""

    def register(self, role: int, group: ReplicaGroup) -> None:
        """A role says which group it belongs to."""
        if self._of.get(role) != group.index:
            self._of[role], self._compact = group.index, None
        self.redundancy = group.redundancy
        if not self.membership.groups:
            self.membership = self._start.membership(group.groups)
            for missing in set(range(self._start.roles)) - set(self._start.present):
                self._of.setdefault(missing, self._start.group(missing, group.groups))

    def value(self) -> ReplicaGroups:
        """For a successor of the controller."""
        changes = MembershipChanges(groups=self.membership.groups, changes=self.membership.changes)
        if self._compact is None:
            self._compact = compact.groups(self._of)
        return ReplicaGroups(of=self._compact, redundancy=self.redundancy, membership=changes)

    def restore(self, found: ReplicaGroups) -> None:
        """Inverse of `value`."""
        self._of, self._compact = compact.group_of(found.of), found.of
        self.redundancy = found.redundancy
        self.membership = Membership(found.membership.groups, found.membership.changes)

    def forget(self) -> None:
        """The job starts over."""
        there = self.membership.taking_part(1 << 62)
        self.membership = Membership(self.membership.groups).changed(-AHEAD, there)

    @property
    def known(self) -> bool:
        """Whether all roles have said theirs."""
        return len(self._of) == self._start.roles

    def of(self, roles: Collection[int]) -> list[int]:
        """The groups that `roles` belong to."""
        if len(roles) == len(self._of):
            return sorted(set(self._of.values()))
        return sorted({self._of[role] for role in roles})

    def roles(self, groups: Collection[int]) -> list[int]:
        """The roles of `groups`."""
        return sorted(role for role, group in self._of.items() if group in groups)

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
        gone = self.of(unplaced)
        left = {role: node for role, node in placed.items() if self._of[role] not in gone}
        return left, "" if left else "no replica group is whole"

    def counterpart(self, role: int, present: Collection[int]) -> int:
        """The role in the same place of the next replica group that is there.

        Groups that are away have different counterparts as far as there are enough: they may adopt a shard.
        """
        return self._counterparts([role], present)[role]

    def _counterparts(self, roles: Collection[int], present: Collection[int]) -> dict[int, int]:
        """Of each of `roles`, which are away."""
        groups, there = self.membership.groups, self.of(present)
        load, instead = dict.fromkeys(there, 0), {}
        for away in sorted(set(range(groups)) - set(there)):
            instead[away] = found = min(there, key=lambda g: (load[g], (g - away) % groups))
            load[found] += 1
        wanted = {self._of[role] for role in roles}
        members: dict[int, list[int]] = {g: [] for g in (*wanted, *(instead[g] for g in wanted))}
        for role, group in sorted(self._of.items()):
            if group in members:
                members[group].append(role)
        other = {
            role: stands_in
            for group in wanted
            for role, stands_in in zip(members[group], members[instead[group]], strict=True)
        }
        return {role: other[role] for role in roles}

    def absent(self, present: Collection[int]) -> dict[int, int]:
        """For the plan: the roles that are away, each with its counterpart among those who are there."""
        if len(present) == self._start.roles:
            return {}
        away = sorted(set(range(self._start.roles)) - set(present))
        if self.known:
            return self._counterparts(away, present)
        return {role: self._start.counterpart(role) for role in away}

    def adopted(self, present: Collection[int]) -> dict[int, int]:
        """For the plan: the roles that are away whose counterpart holds what they had alone."""
        return {} if self.redundancy is Redundancy.REPLICATED else self.absent(present)

    def held_alone(self, role: int, segments: compact.Segments, present: Collection[int]) -> set[str]:
        """Of the segments (with their holders) of a role that is away, those that nobody who is there has."""
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
        lacking = {group: [r for r in unplaced if self._of[r] == group] for group in self.of(unplaced)}
        keep = min(lacking, key=lambda group: (len(lacking[group]), group))
        others = [role for role in placed if self._of[role] != keep]
        return others if len(others) >= len(lacking[keep]) else []

    def returning(
        self, placed: Places, idle: Mapping[str, int], capacity: int, avoided: Collection[str] = ()
    ) -> Places:
        """The places of the groups that can come back: those for which there are idle workers enough."""
        found = dict(placed)
        if not self.known:
            return found
        away = set(range(self._start.roles)) - set(placed) - self.withdrawn
        for group in self.of(away):
            roles = [role for role in self.roles([group]) if role in away]
            taken = Counter(node for role, node in found.items() if role not in placed)
            free = {node: count - taken[node] for node, count in idle.items()}
            assignment = decision.assign(found, free, roles, capacity, avoided=avoided)
            if not assignment.unplaced:
                found = assignment.roles
        return found
