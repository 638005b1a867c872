"""Which replica groups leave, are combined, and come back: the controller's rules."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.control.decide import role_placement
from ft_core.control.decide.groups import Groups, Places
from ft_core.elastic.rules import Membership, Start
from ft_core.protocol.messages import MembershipChanges, Redundancy, ReplicaGroup, ReplicaGroups

PLACES = {0: "a", 1: "b", 2: "c", 3: "d", 4: "e", 5: "f"}
ROLES = 9
"""Three groups of three."""


def groups(redundancy: Redundancy = Redundancy.REPLICATED) -> Groups:
    """Two stages of three groups, in Megatron's order: roles 0 to 2 are the first stage."""
    found = Groups(Start(6, 1, 6))
    for role in range(6):
        assert not found.known
        found.register(role, ReplicaGroup(role % 3, 3, redundancy))
    assert found.known
    return found


def placed(*lost: int) -> dict[int, str]:
    return {role: node for role, node in PLACES.items() if role not in lost}


def test_a_group_leaves_as_a_whole() -> None:
    left, reason = groups().without(placed(1), [1])
    assert (left, reason) == (placed(1, 4), "")
    left, _ = groups().without(placed(1, 5), [1, 5])
    assert left == {0: "a", 3: "d"}


def test_groups_that_cannot_leave() -> None:
    assert groups(Redundancy.SHARDED).without(placed(1), [1])[0] == {}
    assert "sharded" in groups(Redundancy.SHARDED).without(placed(1), [1])[1]
    assert "whole" in groups().without(placed(0, 1, 5), [0, 1, 5])[1]
    assert Groups(Start(6, 1, 6)).without(placed(1), [1]) == ({}, "training has not begun")


def test_nodes_of_broken_groups_fill_the_holes_of_the_one_that_lacks_least() -> None:
    assert groups().to_combine(placed(0, 1, 4, 5), [0, 1, 4, 5]) == [2]
    assert groups().to_combine(placed(0, 1, 5), [0, 1, 5]) == [2, 4]
    assert groups().to_combine(placed(0, 1, 2, 4, 5), [0, 1, 2, 4, 5]) == []
    assert groups(Redundancy.SHARDED).to_combine(placed(0, 1, 5), [0, 1, 5]) == []


def test_a_group_comes_back_once_there_are_workers_for_all_its_roles() -> None:
    here = placed(1, 4)
    assert groups().returning(here, {"x": 1}, 1) == {}
    assert groups().returning(here, {"x": 1, "y": 1}, 1) == {1: "x", 4: "y"}
    assert groups().returning(here, {"x": 2}, 2) == {1: "x", 4: "x"}
    both = placed(1, 2, 4, 5)
    assert groups().returning(both, {"x": 1, "y": 1, "z": 1}, 1) == {1: "x", 4: "y"}
    free = {"x": 1, "y": 1, "z": 1, "w": 1}
    assert set(groups().returning(both, free, 1)) == {1, 2, 4, 5}


def plain_returning(
    found: Groups, placed: Places, idle: dict[str, int], capacity: int, avoided: list[str]
) -> Places:
    """One group after the other by the rule for who is lost, which looks at everything each time."""
    now = dict(placed)
    away = set(range(ROLES)) - set(placed)
    for group in range(3):
        roles = [role for role in range(group, ROLES, 3) if role in away]
        taken = Counter(node for role, node in now.items() if role not in placed)
        free = {node: count - taken[node] for node, count in idle.items()}
        assignment = role_placement.assign(now, free, roles, capacity, avoided=avoided)
        if not assignment.unplaced:
            now = assignment.roles
    return {role: node for role, node in now.items() if role not in placed}


@settings(max_examples=500)
@given(st.data())
def test_groups_come_back_to_places_as_if_their_roles_were_lost(data: st.DataObject) -> None:
    found = Groups(Start(ROLES, 1, ROLES))
    for role in range(ROLES):
        found.register(role, ReplicaGroup(role % 3, 3, Redundancy.REPLICATED))
    nodes, capacity = [f"n{i}" for i in range(7)], data.draw(st.integers(1, 4))
    away = data.draw(st.sets(st.integers(0, 2)))
    placed, load = {}, Counter[str]()
    for role in range(ROLES):
        open_ = [name for name in [*nodes, *(f"full{i}" for i in range(ROLES))] if load[name] < capacity]
        if role % 3 not in away:
            placed[role] = data.draw(st.sampled_from(open_))
            load[placed[role]] += 1
    idle = {name: data.draw(st.integers(0, 5)) for name in nodes}
    avoided = data.draw(st.lists(st.sampled_from(nodes)))
    expected = plain_returning(found, placed, idle, capacity, avoided)
    assert found.returning(placed, idle, capacity, avoided) == expected


def test_a_returning_role_takes_over_from_its_counterpart() -> None:
    assert groups().counterparts([1], placed(1, 4)) == {1: 2}
    assert groups().counterparts([4, 1], placed(1, 4)) == {4: 5, 1: 2}
    assert groups().counterparts([5], placed(2, 5)) == {5: 3}
    assert groups().counterparts([1], placed(1, 2, 4, 5)) == {1: 0}


@settings(max_examples=200)
@given(st.sets(st.integers(0, 11), min_size=1, max_size=11))
def test_counterparts_are_the_least_asked_of_the_next_groups(away: set[int]) -> None:
    """By the rule, one role after the other."""
    many = Groups(Start(24, 2, 24))
    for role in range(24):
        many.register(role, ReplicaGroup(role % 12, 12, Redundancy.ADOPTABLE))
    there, load = sorted(set(range(12)) - away), Counter[int]()
    expected: dict[int, int] = {}
    for group in sorted(away):
        other = min(there, key=lambda g: (load[g], (g - group) % 12))
        load[other] += 1
        expected |= {group: other, group + 12: other + 12}
    present = [role for role in range(24) if role % 12 not in away]
    assert many.absent(present) == expected
    one = min(away) + 12
    assert many.counterparts([one], present) == {one: expected[one]}


def test_groups_that_are_away_have_different_counterparts_while_there_are_enough() -> None:
    many = Groups(Start(8, 1, 8))
    for role in range(8):
        many.register(role, ReplicaGroup(role, 8, Redundancy.ADOPTABLE))
    assert many.adopted([0, 3, 4, 6, 7]) == {1: 3, 2: 4, 5: 6}
    assert many.adopted([0, 7]) == {1: 7, 2: 0, 3: 7, 4: 0, 5: 7, 6: 0}
    assert many.adopted([5]) == {role: 5 for role in range(8) if role != 5}
    assert many.adopted(range(8)) == {}
    assert groups().adopted([0, 2, 3, 5]) == {}, "every group has everything"


def test_what_is_adopted_is_what_nobody_else_has() -> None:
    """Weights are a stage's, one shard is a role's, another belongs to two of them."""
    sharded = groups(Redundancy.ADOPTABLE)
    assert sharded.without(placed(1), [1])[0] == placed(1, 4)
    segments = {"weights": "0-2:1", "shard": "1", "common": "1-2:1"}
    assert sharded.held_alone(1, segments, [0, 2, 3, 5]) == {"shard"}
    assert sharded.held_alone(1, segments, [0, 3]) == {"shard", "common"}
    assert sharded.held_alone(2, segments, [0, 3]) == set(), "the first of those who have it"


def test_the_plan_carries_it_to_another_controller() -> None:
    before, after = groups(), Groups(Start(6, 1, 6))
    before.changed(7, placed(1, 4))
    after.restore(before.value())
    assert after.known
    assert after.membership == before.membership
    assert after.membership.taking_part(8) == (0, 2)
    assert after.roles([1]) == [1, 4]


def test_a_successor_knows_the_groups_of_a_job_that_began_with_some_of_them() -> None:
    """What holds from the start is of a version before all others; so is what holds after starting over."""
    began = Groups(Start(3, 1, 2))
    began.register(0, ReplicaGroup(0, 3, Redundancy.REPLICATED))
    again = groups()
    again.forget()
    for known in (began, again):
        decoded = msgspec.json.decode(msgspec.json.encode(known.value()), type=ReplicaGroups)
        successor = Groups(Start(3, 1, 2))
        successor.restore(decoded)
        assert successor.membership == known.membership
    assert began.membership.taking_part(1) == (0, 1)


def test_who_takes_part_is_said_in_few_words() -> None:
    """Of as many groups as a job of data parallelism alone has, also where some are away."""
    many = 100_096
    membership = Membership(many).changed(4, set(range(many)) - {7, *range(800, 1800)})
    membership = membership.changed(9, range(many))
    said = msgspec.json.encode(membership.value())
    assert len(said) < 200
    assert Membership.of(msgspec.json.decode(said, type=MembershipChanges)) == membership
