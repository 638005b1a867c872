"""What is known of all roles, in few words: sets of roles that differ in their first one alone are said once.

Of a job whose layout is regular that is some hundred bytes, however many roles there are. What is not
regular is said in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ft_core.protocol.groups import roles_in, runs_of, segment_id, text_of
from ft_core.protocol.messages import Catalogue, Counterparts, Family, GroupFamily, Holders, SegmentId

Segments = dict[SegmentId, Holders]
"""The segments of a role, with their holders."""


def catalogue(known: Mapping[int, Segments]) -> Catalogue:
    """The segments of all roles."""
    holders: dict[SegmentId, Holders] = {}
    tellers: dict[SegmentId, list[int]] = {}
    for role, found in known.items():
        for segment, held in found.items():
            holders[segment] = held
            tellers.setdefault(segment, []).append(role)
    firsts: dict[str, list[int]] = {}
    others = {}
    for segment, held in holders.items():
        told = tellers[segment]
        if len(told) == 1 and held == str(told[0]) and segment == _id(held):
            firsts.setdefault("0", []).append(told[0])
        elif held == text_of(runs_of(told)) and segment == _id(held):
            firsts.setdefault(_pattern(held), []).append(min(told))
        else:
            others[segment] = held, text_of(runs_of(told))
    return Catalogue([Family(p, text_of(runs_of(found))) for p, found in firsts.items()], others)


def expanded(found: Catalogue) -> dict[int, Segments]:
    """The segments of all roles, from what `catalogue` has made of them."""
    known: dict[int, Segments] = {}
    for family in found.families:
        for first, held in _members(family):
            segment = _id(held)
            for role in all_in(held) if held != str(first) else (first,):
                known.setdefault(role, {})[segment] = held
    for segment, (held, tellers) in found.others.items():
        for role in all_in(tellers):
            known.setdefault(role, {})[segment] = held
    return known


def groups(of: Mapping[int, int]) -> list[GroupFamily]:
    """Replica groups, by role."""
    members: dict[int, list[int]] = {}
    for role, group in of.items():
        members.setdefault(group, []).append(role)
    shapes: dict[str, list[tuple[int, int]]] = {}
    for group, roles in members.items():
        shapes.setdefault(_pattern(text_of(runs_of(roles))), []).append((min(roles), group))
    families = []
    for pattern, found in shapes.items():
        for part in _ascending(sorted(found)):
            firsts, indices = zip(*part, strict=True)
            families.append(GroupFamily(Family(pattern, text_of(runs_of(firsts))), text_of(runs_of(indices))))
    return families


def group_of(families: Iterable[GroupFamily]) -> dict[int, int]:
    """The replica group of each role, from what `groups` has made of them."""
    return {
        role: index
        for family in families
        for (_, roles), index in zip(_members(family.roles), all_in(family.indices), strict=True)
        for role in all_in(roles)
    }


def counterparts(others: Mapping[int, int]) -> Counterparts:
    """Roles with who stands for each: for a group that is away, the same places of another."""
    shifts: dict[int, list[int]] = {}
    for role, other in others.items():
        shifts.setdefault(other - role, []).append(role)
    return Counterparts(tuple((by, text_of(runs_of(roles))) for by, roles in sorted(shifts.items())))


def all_in(roles: str) -> Iterator[int]:
    """The roles of a text such as `0-3,8`, one after the other."""
    for run in roles_in(roles):
        yield from run


def contains(roles: str, role: int) -> bool:
    """Whether a role is in a text such as `0-3,8`."""
    return any(role in run for run in roles_in(roles))


def _members(family: Family) -> Iterator[tuple[int, str]]:
    """First role, and the roles, of each."""
    pattern = roles_in(family.pattern)
    for first in all_in(family.firsts):
        yield first, text_of(range(run.start + first, run.stop + first, run.step) for run in pattern)


def _pattern(roles: str) -> str:
    runs = roles_in(roles)
    first = min(run[0] for run in runs)
    return text_of(range(run.start - first, run.stop - first, run.step) for run in runs)


def _id(holders: str) -> SegmentId:
    return segment_id([int(holders)] if holders.isdecimal() else sorted(all_in(holders)))


def _ascending(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs of them in which the second ones ascend as well."""
    begin = 0
    for at in range(1, len(pairs) + 1):
        if at == len(pairs) or pairs[at][1] < pairs[at - 1][1]:
            yield pairs[begin:at]
            begin = at
