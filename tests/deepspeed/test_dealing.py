"""What a script's own loader draws while replica groups leave and come back (policy `shrink`)."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from ft_core.adapter import Redundancy, ReplicaGroup
from ft_core.elastic.rules import Membership
from ft_core.errors import ConfigError
from ft_deepspeed.dealing import Dealing

GROUPS = 3


class Session:
    """What a dealing asks of the engine."""

    def __init__(self) -> None:
        self.groups = SimpleNamespace(membership=Membership(GROUPS))


class Role:
    """A script that trains epoch after epoch with DataLoader and DistributedSampler, as many do."""

    def __init__(self, group: int, samples: int, size: int, micro: int, **options: Any) -> None:
        self.micro = micro
        self.session, self.position = Session(), 0
        self.training = True
        self.patched: Any = None
        self.dealing = Dealing(
            self.session,  # type: ignore[arg-type]
            ReplicaGroup(group, GROUPS, Redundancy.REPLICATED),
            micro,
            position=lambda: self.position,
            training=lambda: self.training,
        )
        data = TensorDataset(torch.arange(samples))
        self.sampler: Any = DistributedSampler(data, GROUPS, group)
        self.loader = DataLoader(data, batch_size=size, sampler=self.sampler, **options)
        self.batches = self._batches()
        self.drawn: dict[int, list[list[int]]] = {}
        self.trained: dict[int, Any] = {}

    def _batches(self) -> Iterator[list[int]]:
        begun, skip = divmod(self.position * self.micro, len(self.loader))
        for epoch in itertools.count(begun):
            self.sampler.set_epoch(epoch)
            for (batch,) in itertools.islice(self.loader, skip, None):
                yield batch.tolist()
            skip = 0

    def resume(self, version: int, saved: Any) -> None:
        """Go on from a checkpoint, as the recipes do."""
        self.position = version
        self.dealing.resume(version, saved)

    def draw(self) -> None:
        """The batches of the step under way."""
        self.drawn[self.position + 1] = [next(self.batches) for _ in range(self.micro)]

    def step(self) -> None:
        self.dealing.check_drawn(self.position + 1, self.micro)
        self.trained[self.position + 1] = self.dealing.finish(self.position + 1)
        self.position += 1

    def epoch(self, version: int, membership: Membership) -> None:
        """The engine goes back to `version`, and does what the script has done since once more."""
        self.session.groups.membership = membership
        for step in range(version + 1, self.position + 1):
            self.trained[step] = self.dealing.finish(step)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has torch's own loaders before it."""
    monkeypatch.setattr(BatchSampler, "__iter__", BatchSampler.__iter__)
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)


def plain(group: int, samples: int, size: int, steps: int, **options: Any) -> list[list[int]]:
    """What torch deals."""
    data = TensorDataset(torch.arange(samples))
    sampler: Any = DistributedSampler(data, GROUPS, group)
    loader = DataLoader(data, batch_size=size, sampler=sampler, **options)
    found: list[list[int]] = []
    epoch = 0
    while len(found) < steps:
        sampler.set_epoch(epoch)
        found += [batch.tolist() for (batch,) in loader]
        epoch += 1
    return found[:steps]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [48, 50, 10])
def test_with_all_groups_nothing_changes(samples: int, drop_last: bool):
    expected = [plain(group, samples, 3, 40, drop_last=drop_last) for group in range(GROUPS)]
    for group in range(GROUPS):
        role = Role(group, samples, 3, micro=2, drop_last=drop_last)
        for _ in range(20):
            role.draw()
            role.step()
        assert [batch for step in role.drawn.values() for batch in step] == expected[group]


@pytest.mark.parametrize("seed", range(12))
def test_each_sample_once_whoever_leaves_and_returns(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Epochs begin before and after a step's batches are drawn, from this version and the one before."""
    dice = random.Random(seed)
    samples, size, micro = dice.randint(20, 60), dice.randint(1, 4), dice.randint(1, 3)
    options = {"drop_last": dice.random() < 0.5}
    untouched = BatchSampler.__iter__
    roles = []
    for group in range(GROUPS):
        monkeypatch.setattr(BatchSampler, "__iter__", untouched)
        role = Role(group, samples, size, micro, **options)
        role.patched = BatchSampler.__iter__
        roles.append(role)
    membership = Membership(GROUPS)

    def change(back: int) -> None:
        nonlocal membership
        members = dice.sample(range(GROUPS), dice.randint(1, GROUPS))
        version = max(0, roles[0].position - back)
        membership = membership.changed(version, members)
        for role in roles:
            role.epoch(version, membership)

    for _ in range(60):
        if dice.random() < 0.15:
            change(back=dice.choice([0, 1]))
        for role in roles:
            monkeypatch.setattr(BatchSampler, "__iter__", role.patched)
            role.draw()
        if dice.random() < 0.15:
            change(back=dice.choice([0, 1]))
        for role in roles:
            role.step()

    assert roles[0].trained == roles[1].trained == roles[2].trained
    seen: Counter[int] = Counter()
    for step, record in roles[0].trained.items():
        assert sorted(record.samples) == list(membership.contributing(step))
        for group, ranges in record.samples.items():
            at = [p for first, end in ranges for p in range(first, end)]
            seen.update(at)
            stream = roles[0].dealing._stream
            assert stream is not None
            drawn = [index for batch in roles[int(group)].drawn[step] for index in batch]
            assert drawn == [stream.index(p) for p in at]
    last = roles[0].trained[60]
    seen.update(p for _, first, end in last.waiting for p in range(first, end))
    assert seen == Counter(range(last.next))


def test_other_samplers_are_left_alone():
    role = Role(1, 40, 2, micro=1)
    other = TensorDataset(torch.arange(100, 130))
    sampler: Any = DistributedSampler(other, GROUPS, 1, shuffle=False)
    role.training = False
    before = [b.tolist() for (b,) in DataLoader(other, batch_size=5, sampler=sampler)]
    role.training = True
    role.draw()
    during = [b.tolist() for (b,) in DataLoader(other, batch_size=5, sampler=sampler)]
    assert before == during == [list(range(101, 130, 3))[:5], list(range(101, 130, 3))[5:]]
    role.step()
    assert role.trained[1].next == 2 * GROUPS


def test_a_loader_with_processes_that_would_draw_ahead_has_none(caplog: pytest.LogCaptureFixture):
    expected = plain(0, 13, 2, 7)
    role = Role(0, 13, 2, micro=1, num_workers=2, persistent_workers=True, timeout=9)
    for _ in range(7):  # into a third epoch
        role.draw()
        assert not multiprocessing.active_children()
        role.step()
    assert [batch for step in role.drawn.values() for batch in step] == expected
    assert (role.loader.num_workers, role.loader.timeout) == (2, 9)
    [message] = caplog.messages
    assert "not by num_workers=2 others: they read ahead" in message


def test_a_script_that_draws_ahead_is_refused():
    role = Role(0, 40, 2, micro=1)
    role.draw()
    next(role.batches)
    with pytest.raises(ConfigError, match="has trained 1 and drawn 2"):
        role.step()


def test_a_script_without_the_sampler_is_refused():
    role = Role(0, 40, 2, micro=1)
    with pytest.raises(ConfigError, match="drew from none"):
        role.step()


def test_a_successor_deals_on():
    """From the envelope, though it has seen nothing of what happened before."""
    role, membership = Role(0, 40, 2, micro=1), Membership(GROUPS)
    for step in range(1, 9):
        role.draw()
        role.step()
        if step == 3:
            membership = membership.changed(3, [0, 2])
            role.epoch(3, membership)
    saved = role.dealing.state(8)
    assert saved["deal"]["next"] > 0
    for _ in range(9, 15):
        role.draw()
        role.step()
    successor = Role(0, 40, 2, micro=1)
    successor.session.groups.membership = membership
    for step in range(1, 9):
        successor.draw()
        successor.dealing.finish(step)
        successor.position += 1
    assert successor.dealing.restore(8, saved)
    for step in range(9, 15):
        successor.draw()
        successor.step()
        assert successor.drawn[step] == role.drawn[step]
        assert successor.trained[step] == role.trained[step]


@pytest.mark.parametrize("step", [3, 7, 13, 14])
@pytest.mark.parametrize("saved", [True, False])
def test_a_script_goes_on_from_its_checkpoint(step: int, saved: bool):
    """Where all groups were there, also from a checkpoint that says nothing of the samples."""
    role = Role(1, 42, 2, micro=1)  # seven batches in an epoch
    said = None
    for _ in range(step + 9):
        role.draw()
        role.step()
        if role.position == step and saved:
            said = role.dealing.state(step)
    later = Role(1, 42, 2, micro=1)
    later.resume(step, said)
    for _ in range(9):
        later.draw()
        later.step()
        assert later.drawn[later.position] == role.drawn[later.position]
        assert later.trained[later.position] == role.trained[later.position]


def test_a_checkpoint_has_what_waits():
    role, membership = Role(0, 42, 2, micro=1), Membership(GROUPS).changed(3, [0, 2])
    for step in range(1, 7):
        role.draw()
        role.step()
        if step == 3:
            role.epoch(3, membership)
    saved = role.dealing.state(6)
    assert saved["deal"]["waiting"]
    later = Role(0, 42, 2, micro=1)
    later.resume(6, saved)
    later.draw()
    later.step()
    first = saved["deal"]["waiting"][0][1]
    assert (first, first + 1) in later.trained[7].samples[0]


def test_a_script_that_passes_over_nothing_is_refused():
    role = Role(0, 42, 2, micro=1)
    role.resume(3, None)
    role.batches = iter([batch.tolist() for (batch,) in itertools.islice(role.loader, 1)])
    role.draw()
    with pytest.raises(ConfigError, match="after loading a checkpoint"):
        role.step()
