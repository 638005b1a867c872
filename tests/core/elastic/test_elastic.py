"""Who takes part in a step, and who trains which samples, while replica groups leave and come back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from ft_core.elastic.rules import (
    AHEAD,
    CHANGES,
    PAST,
    TELLERS,
    Deal,
    Membership,
    Range,
    Start,
    lr_factor,
    positions,
    stand_in,
    tellers,
)
from ft_core.protocol.messages import Dealt, Redundancy, ReplicaGroup

Hands = list[dict[int, list[Range]]]
"""What a step's turns have dealt."""


@dataclass
class Role:
    """Draws the batches of a step as it begins, and keeps them in case the step is repeated.

    A recovery that goes further back than others leaves it with batches of steps that are dealt anew.
    """

    membership: Membership
    deal: Deal
    turns: int
    version: int = 0
    states: dict[int, Any] = field(default_factory=dict)
    drawn: dict[int, Hands] = field(default_factory=dict)
    trained: dict[int, dict[int, list[Range]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states[self.version] = self.deal.to_json()

    def draw(self) -> None:
        """Begin the step under way. What was drawn for it before is what is drawn again."""
        step = self.version + 1
        hands = [self.deal.take(step, self.membership) for _ in range(self.turns)]
        assert self.drawn.setdefault(step, hands) == hands

    def finish(self) -> None:
        self.version += 1
        self.trained[self.version] = self.deal.step_done(self.version, self.membership)
        self.states[self.version] = self.deal.to_json()

    def epoch(self, version: int, membership: Membership) -> None:
        """Roll back to `version`, and go on with `membership`."""
        self.version, self.membership = version, membership
        self.deal = Deal.from_json(self.states[version])
        self.trained = {step: samples for step, samples in self.trained.items() if step <= version}
        self.drawn = {step: hands for step, hands in self.drawn.items() if step <= version + AHEAD}


def seen(role: Role) -> Counter[int]:
    return Counter(
        at for done in role.trained.values() for ranges in done.values() for at in positions(ranges)
    )


def waiting(deal: Deal) -> list[int]:
    return positions((first, end) for _, first, end in deal.waiting)


@pytest.mark.parametrize("seed", range(40))
def test_each_sample_once_whoever_leaves_and_returns(seed: int):
    """Epochs at any time with any groups, mostly from the newest version or the one before it."""
    draw = random.Random(seed)
    groups, turn = draw.randint(2, 5), draw.randint(1, 4)
    role = Role(Membership(groups), Deal(turn, next=draw.choice([0, 1000])), turns=draw.randint(1, 3))
    start = role.deal.next
    for _ in range(120):
        role.draw()  # asserts that a repeated step has the same samples: see Role.draw
        if draw.random() < 0.4:
            version = max(role.version - draw.choice([0, 0, 0, 1, 1, 1, 2, 5]), 0)
            members = draw.sample(range(groups), draw.randint(1, groups))
            role.epoch(version, role.membership.changed(version, members))
        else:
            role.finish()
    role.deal = Deal.from_json(role.states[role.version])
    counts = seen(role)
    assert set(counts.values()) == {1}
    assert sorted([*counts, *waiting(role.deal)]) == list(range(start, role.deal.next))
    for step, samples in role.trained.items():
        assert tuple(samples) == role.membership.contributing(step)
        sizes = {len(positions(ranges)) for ranges in samples.values()}
        assert sizes <= {turn * role.turns}  # none has more than its share, nor less
    # Once all have been back for long enough nothing waits any more.
    role.epoch(role.version, role.membership.changed(role.version, range(groups)))
    for _ in range(AHEAD + 1 + 2 * groups * len(role.states)):
        role.draw()
        role.finish()
    assert not role.deal.waiting
    assert sorted(seen(role)) == list(range(start, role.deal.next))


def test_who_trains_what_when_a_group_leaves():
    """Three groups with two samples each, group 2 leaves after step 4: as in docs/operations/storage.md."""
    role = Role(Membership(3), Deal(2), turns=1)
    for _ in range(4):
        role.draw()
        role.finish()
    role.epoch(4, role.membership.changed(4, (0, 1)))
    for _ in range(6):
        role.draw()
        role.finish()
    assert {step: role.trained[step] for step in range(4, 11)} == {
        4: {0: [(18, 20)], 1: [(20, 22)], 2: [(22, 24)]},
        5: {0: [(24, 26)], 1: [(26, 28)]},  # 28 and 29 were group 2's
        6: {0: [(30, 32)], 1: [(32, 34)]},  # 34 and 35 too
        7: {0: [(36, 38)], 1: [(38, 40)]},  # the first that is dealt to two
        8: {0: [(28, 30)], 1: [(40, 42)]},
        9: {0: [(34, 36)], 1: [(42, 44)]},
        10: {0: [(44, 46)], 1: [(46, 48)]},
    }


def test_who_takes_part_when_a_group_comes_back():
    """First without samples, so with a zero gradient."""
    membership = Membership(3, ((4, (0, 1)),)).changed(10, (0, 1, 2))
    assert membership.taking_part(10) == (0, 1)
    for step in (11, 12):
        assert membership.taking_part(step) == (0, 1, 2)
        assert membership.dealt(step) == membership.contributing(step) == (0, 1)
    assert membership.contributing(13) == (0, 1, 2)


@pytest.mark.parametrize("members", [(0, 1), (0, 2), (0,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("ahead", [0, 1])
def test_roles_that_had_drawn_ahead_agree_with_those_that_had_not(members: tuple[int, ...], ahead: int):
    """One has done step v + 1 and drawn v + 2 when it hears of the epoch; the other is still in v + 1."""
    before = Membership(3, ((4, (0, 1)),))  # and what group 2 was dealt in vain is being dealt again
    quick, slow = (Role(before, Deal(2, 24, [[6, 3, 9]]), turns=2, version=4) for _ in range(2))
    for role in (quick, slow):
        role.draw()
        role.finish()
        role.draw()
    for _ in range(ahead):
        quick.finish()
        quick.draw()
    for role in (quick, slow):
        role.epoch(5, role.membership.changed(5, members))
        for _ in range(8):
            role.draw()  # for the quick one, what it had drawn
            role.finish()
    assert quick.trained == slow.trained
    assert quick.deal == slow.deal
    assert set(quick.trained[9]) == set(members)


def test_an_epoch_from_an_earlier_version_takes_back_later_changes():
    membership = Membership(4).changed(5, (0, 1, 2)).changed(9, (0, 1, 2, 3))
    assert membership.changes == ((5, (0, 1, 2)), (9, (0, 1, 2, 3)))
    assert membership.changed(8, (0, 2)).changes == ((5, (0, 1, 2)), (8, (0, 2)))
    assert membership.changed(9, (1, 2)).changes == ((5, (0, 1, 2)), (9, (1, 2)))
    assert membership.changed(5, (3, 0)).changes == ((5, (0, 3)),)
    assert membership.changed(4, (0, 1, 2, 3)) == Membership(4)


def test_few_groups_tell_of_samples_and_they_are_far_from_each_other():
    assert tellers([]) == set() and tellers([3]) == {3} and tellers(range(8)) == set(range(8))
    told = sorted(tellers([group for group in range(800) if group not in (0, 100)]))
    assert len(told) == TELLERS and all(later - one > 90 for one, later in pairwise(told))


def test_what_is_known_of_who_took_part_does_not_grow_with_the_jobs_age():
    membership = Membership(3)
    for version in range(10 * CHANGES):
        membership = membership.changed(version, [0, 1] if version % 2 else [0, 1, 2])
        assert membership.taking_part(version + 1) == ((0, 1) if version % 2 else (0, 1, 2))
    assert len(membership.changes) == CHANGES
    before = 10 * CHANGES - 20
    back = membership.changed(before, [0])
    assert back.dealt(before + 1) == membership.dealt(before + 1) and back.taking_part(before + 1) == (0,)


def test_an_epoch_that_changes_nobody_is_no_change():
    membership = Membership(3).changed(5, (0, 1))
    assert Membership(3).changed(5, (2, 1, 0)) == Membership(3)
    assert membership.changed(8, (1, 0)) == membership
    assert membership.changed(5, (0, 1)) == membership


@pytest.mark.parametrize("seed", range(20))
def test_what_steps_trained_follows_from_the_newest_state(seed):
    """Whoever leaves and returns, and as often as the state has been in a snapshot: for as many steps as are
    promised, and never for one wrongly."""
    chance = random.Random(seed)
    deal, membership, told = Deal(2), Membership(3), {}
    for step in range(1, 150):
        if chance.random() < 0.1:
            here = sorted(chance.sample(range(3), chance.randint(1, 3)))
            membership = membership.changed(step - 1, here)
        if chance.random() < 0.3:
            deal = Deal.from_json(deal.to_json())
        for _ in range(chance.randint(0, 3)):
            deal.take(step, membership)
        told[step] = deal.ledger_entry(step, membership)
        after = chance.randint(max(0, step - 90), step)
        found = dict(deal.entries_after(after, membership))
        assert found == {known: told[known] for known in found}
        assert set(found) >= set(range(max(after, step - PAST) + 1, step + 1)), "what is promised"
        assert len(found) <= 2 * PAST and all(known > after for known in found)


def test_a_deal_of_a_checkpoint_from_before_has_no_past():
    deal = Deal.from_json({"turn": 2, "next": 8, "waiting": []})
    assert list(deal.entries_after(0, Membership(2))) == []
    deal.take(4, Membership(2))
    entry = deal.ledger_entry(4, Membership(2))
    assert list(deal.entries_after(0, Membership(2))) == [(4, entry)]


def test_membership_and_deal_travel_in_json():
    membership = Membership(3).changed(5, (0, 1)).changed(9, (1,))
    assert Membership.from_json(membership.to_json()) == membership
    deal = Deal(2)
    for step in range(1, 8):
        deal.take(step, membership)
        deal.step_done(step, membership)
    copy = Deal.from_json(deal.to_json())
    assert copy.waiting and copy == deal
    copy.take(9, membership)
    assert copy.waiting != deal.waiting  # nothing is shared


def megatron(rank: int, ranks: int, consumed: int, micro_batch: int, count: int) -> list[int]:
    """`MegatronPretrainingSampler`: micro batches of all ranks side by side, in the order of the ranks."""
    return [
        consumed + micro * micro_batch * ranks + rank * micro_batch + at
        for micro in range(count)
        for at in range(micro_batch)
    ]


def dealt(deal: Deal, groups: int, turns: int, steps: int) -> dict[int, list[int]]:
    """By group, with all there, over some steps."""
    found: dict[int, list[int]] = {group: [] for group in range(groups)}
    for step in range(1, steps + 1):
        for _ in range(turns):
            for group, ranges in deal.take(step, Membership(groups)).items():
                found[group] += positions(ranges)
        deal.step_done(step, Membership(groups))
    return found


@pytest.mark.parametrize(("groups", "micro_batch", "turns"), [(1, 3, 2), (2, 1, 4), (4, 2, 1), (3, 5, 3)])
def test_with_all_groups_samples_go_as_in_megatron(groups: int, micro_batch: int, turns: int):
    found = dealt(Deal(micro_batch, next=120), groups, turns, steps=4)
    assert found == {g: megatron(g, groups, 120, micro_batch, 4 * turns) for g in range(groups)}


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_with_all_groups_samples_go_as_in_torch(groups: int):
    """DeepSpeed's data loader uses torch's sampler: one sample after the other."""
    found = dealt(Deal(1), groups, turns=6, steps=5)
    data = range(groups * 30)
    for group in range(groups):
        sampler = DistributedSampler(data, num_replicas=groups, rank=group, shuffle=False)  # type: ignore[arg-type]
        assert found[group] == list(sampler)


def test_what_a_step_was_dealt_is_trained_as_few_ranges():
    deal = Deal(3)
    deal.take(1, Membership(1))
    deal.take(1, Membership(1))
    assert deal.step_done(1, Membership(1)) == {0: [(0, 6)]}


@pytest.mark.parametrize(
    ("intervention", "factors"),
    [
        ("sqrt", {1: 0.5, 2: 0.5**0.5, 4: 1.0}),
        ("linear", {1: 0.25, 3: 0.75, 4: 1.0}),
        ("none", {1: 1.0, 4: 1.0}),
    ],
)
def test_lr_factor(intervention: str, factors: Mapping[int, float]):
    assert {live: lr_factor(intervention, live, 4) for live in factors} == factors


@pytest.mark.parametrize("intervention", ["sqrt", "linear", "none"])
def test_lr_is_untouched_with_all_groups(intervention: str):
    assert all(lr_factor(intervention, n, n) == 1.0 for n in range(1, 200))


def test_lr_factor_of_no_known_kind():
    with pytest.raises(ValueError, match="sqrt, linear, none"):
        lr_factor("square", 1, 2)


@pytest.mark.parametrize(
    ("start", "present", "counterparts", "groups"),
    [
        (Start(4, 1, 2), [0, 1], {2: 0, 3: 1}, {4: [0, 1, 2, 3], 2: [0, 0, 1, 1]}),
        # Two stages of three groups, of which two start.
        (Start(6, 2, 2), [0, 1, 3, 4], {2: 0, 5: 3}, {3: [0, 1, 2, 0, 1, 2]}),
        # Groups of two tensor-parallel peers in two stages: one of three starts.
        (Start(12, 2, 2), [0, 1, 6, 7], {2: 0, 3: 1, 4: 0, 11: 7}, {3: [0, 0, 1, 1, 2, 2] * 2}),
    ],
)
def test_a_start_without_some_groups(
    start: Start, present: list[int], counterparts: dict[int, int], groups: dict[int, list[int]]
) -> None:
    assert start.present == present
    assert {role: start.counterpart(role) for role in counterparts} == counterparts
    for many, of in groups.items():
        assert [start.group(role, many) for role in range(start.roles)] == of
        membership = start.membership(many)
        here = tuple(sorted({of[role] for role in present}))
        assert membership.taking_part(1) == membership.dealt(1) == membership.contributing(1) == here
    assert Start(4, 1, 4).membership(4) == Membership(4)


def test_a_job_begins_without_groups_that_the_others_can_do_without() -> None:
    start = Start(4, 1, 2)  # of four groups of a role each, two are there
    replicated, adoptable, sharded = (ReplicaGroup(1, 4, redundancy) for redundancy in Redundancy)
    assert start.objection(replicated, 1, 5) == ""
    assert start.objection(adoptable, 1, 0) == ""
    assert "of step 5 is in a checkpoint" in start.objection(adoptable, 1, 5)
    assert "others cannot adopt" in start.objection(sharded, 1, 0)
    assert "role 0 is in replica group 1 of 4" in start.objection(replicated, 0, 0)
    assert Start(4, 1, 4).objection(sharded, 1, 5) == ""


def test_gradients_are_averaged_over_the_groups_that_count() -> None:
    """Two of three groups from step 1 on; the third comes back with step 11, and has samples from 13 on."""
    membership = Membership(3).changed(0, [0, 1]).changed(10, [0, 1, 2])
    full = Membership(3)
    for factor in (1.0, 1 / 3, 1 / 12):
        assert full.gradient_scale(5, 2, factor) == factor
        assert membership.gradient_scale(5, 0, factor) == factor * 3 / 2
        assert membership.gradient_scale(5, 0, factor, counted=2) == factor
        assert membership.gradient_scale(5, 2, factor) is None
        assert membership.gradient_scale(11, 2, factor) is membership.gradient_scale(12, 2, factor) is None
        assert membership.gradient_scale(12, 0, factor, counted=3) == factor * 3 / 2
        assert membership.gradient_scale(13, 2, factor) == factor


def test_who_writes_for_a_role_that_is_away() -> None:
    peers = (1, 3, 5)
    assert [stand_in(role, peers, ()) for role in peers] == [1, 3, 5]
    assert [stand_in(role, peers, {1, 2}) for role in peers] == [3, 3, 5]
    assert [stand_in(role, peers, {3, 5}) for role in peers] == [1, 1, 1]


def test_a_group_without_samples_reads_what_the_first_one_does() -> None:
    membership, deal = Membership(3).changed(0, [0, 1]), Deal(2)
    entry = deal.copy()
    assert [entry.take_for(group, 5, membership) for group in (0, 1, 2)] == [[0, 1], [6, 7], [8, 9]]
    assert (deal.next, entry.next) == (0, 12)
    samples = {0: [(0, 2), (4, 6), (8, 10)], 1: [(2, 4), (6, 8), (10, 12)]}
    assert entry.ledger_entry(5, membership) == Dealt(samples, waiting=[], next=12)
