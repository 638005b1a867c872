from __future__ import annotations

import gc
import os
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from core.models import Model
from memory_of import memory_files
from waiting import wait_for_value

from ft_core.adapter import Maker, StateTensor
from ft_core.errors import ConfigError, CorruptSnapshot, FtError
from ft_core.state import snapshot
from ft_core.state.adoption import Snapshots
from ft_core.state.checksums import hash_of, verify
from ft_core.state.envelope import decode
from ft_core.state.manifest import CHUNK, layout
from ft_core.state.memory import TORN, SharedMemory, SnapshotBuffer, snapshot_memory
from ft_core.state.snapshot import Snapshotter
from ft_core.state.store import NodeStore, RoleMemory

copyto = np.copyto


def same(a, b):
    late = (a[1] is None) == (b[1] is None) and (a[1] is None or torch.equal(a[1], b[1]))
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and late and a[2] == b[2]


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """They hold memory for a moment after they have said that a copy is done: not into the next test."""
    made = []

    def executor(*about):
        made.append(ThreadPoolExecutor(*about))
        return made[-1]

    monkeypatch.setattr(snapshot, "ThreadPoolExecutor", executor)
    yield
    for each in made:
        each.shutdown()


@pytest.fixture
def parts():
    model, memory, staged = Model(), RoleMemory(), []
    snapshotter = Snapshotter(model, lambda slot, s: memory.allocate(slot, s).memory.address, staged.append)
    return model, memory, snapshotter, staged


def load(snapshotter, memory, version):
    slot, buffer = memory.find(version)
    snapshotter.load(slot, buffer.memory.address, buffer.segments, version)


def test_any_of_the_last_two_versions_comes_back(parts):
    model, memory, snapshotter, staged = parts
    contents = []
    for version in range(5):
        snapshotter.stage(version)
        snapshotter.wait()
        contents.append(model.content())
        assert memory.versions() == ([version - 1, version] if version else [0])
        model.step(snapshotter)
    assert staged == [0, 1, 2, 3, 4]
    for version in (3, 4, 3):
        load(snapshotter, memory, version)
        assert same(model.content(), contents[version])


@pytest.mark.parametrize("loaded", [False, True])
def test_what_is_still_there_is_not_copied_again(parts, loaded):
    """An abandoned step has changed only what may change before the optimizer steps. Nor is the copy read."""
    model, memory, snapshotter, _ = parts
    model.step(snapshotter)
    snapshotter.stage(1)
    snapshotter.wait()
    before = model.content()
    if loaded:
        model.step(snapshotter)
        load(snapshotter, memory, 1)
    model.statistic.add_(1)
    model.lr = 7.0
    _, buffer = memory.find(1)
    buffer.data(0)[17] ^= 4
    load(snapshotter, memory, 1)
    assert same(model.content(), before)


def test_a_version_from_before_the_optimizer_had_state_takes_that_state_away(parts):
    model, memory, snapshotter, _ = parts
    snapshotter.stage(0)
    snapshotter.wait()
    before = model.content()
    model.step(snapshotter)
    load(snapshotter, memory, 0)
    assert same(model.content(), before) and model.late is None


def test_an_adapter_that_does_not_take_it_away_is_told(parts):
    model, memory, snapshotter, _ = parts
    snapshotter.stage(0)
    snapshotter.wait()
    model.step(snapshotter)
    restore, kept = model.restore, model.late
    model.restore = lambda *about: (restore(*about), setattr(model, "late", kept))
    with pytest.raises(FtError, match=r"after `restore` of version 0 .* 1 tensors .* late for one"):
        load(snapshotter, memory, 0)


def brought(memory, version, fill):
    """As an agent brings a version from elsewhere, in which the count is another."""
    _, there = memory.find(version)
    made = SnapshotBuffer.create(there.segments, snapshot_memory)
    for index, segment in enumerate(there.segments):
        made.data(index)[:] = there.data(index)
        for item in segment.items:
            if item.name == "count":
                made.data(index)[item.offset : item.offset + 4] = torch.tensor(fill).numpy().tobytes()
        for at in range(segment.chunks):
            made.checksums(index)[at] = hash_of(made.data(index), at)
    made.version = version
    return made


def test_a_version_that_is_there_is_loaded_from_memory_that_the_agent_has_brought(parts):
    """It may be of another past, and what is staged next goes into memory that the agent has."""
    model, memory, snapshotter, _ = parts
    for version in (1, 2):
        model.step(snapshotter)
        snapshotter.stage(version)
        snapshotter.wait()
    for _ in range(2):  # the second time it is interrupted before it is used
        other = brought(memory, 2, 77.0)
        memory.drop_after(-1)
        slot = memory.take(other)
        snapshotter.load(slot, other.memory.address, other.segments, 2)
        assert model.count.item() == 77.0
    for version in (3, 4):
        model.step(snapshotter)
        snapshotter.stage(version)
        snapshotter.wait()
        assert memory.find(version) is not None
    assert memory.versions() == [3, 4]


def test_memory_that_the_agent_has_brought_and_nobody_has_loaded_is_used_again(parts):
    """The epoch has ended before that: all go back to the older version, which is there."""
    model, memory, snapshotter, _ = parts
    for version in (1, 2):
        model.step(snapshotter)
        snapshotter.stage(version)
        snapshotter.wait()
    newer = brought(memory, 2, 0.0)
    newer.version = 3
    memory.take(newer)  # in place of version 1
    memory.drop_after(2)
    load(snapshotter, memory, 2)
    model.step(snapshotter)
    snapshotter.stage(3)
    snapshotter.wait()
    assert memory.versions() == [2, 3]


MAKER = Maker("F", "1.2", "a loop", 3)


@pytest.mark.parametrize(
    "maker", [replace(MAKER, framework="G"), replace(MAKER, adapter="another"), replace(MAKER, format=2)]
)
def test_what_another_adapter_has_saved_is_not_restored(maker):
    model, memory = Model(), RoleMemory()
    allocate = lambda slot, s: memory.allocate(slot, s).memory.address  # noqa: E731
    saving = Snapshotter(model, allocate, lambda version: None, maker=maker)
    saving.stage(5)
    saving.wait()
    other = Model()
    other.step()
    before = other.content()
    with pytest.raises(ConfigError) as wrong:
        load(Snapshotter(other, allocate, lambda version: None, maker=MAKER), memory, 5)
    assert str(wrong.value) == (
        f"step 5 was saved by {maker}, and F 1.2 (a loop, format 3) cannot restore it: go on with what has "
        "saved it, or give another durable directory"
    )
    assert same(other.content(), before)


def test_what_another_release_of_the_framework_has_saved_is_restored_and_said(caplog):
    model, memory = Model(), RoleMemory()
    allocate = lambda slot, s: memory.allocate(slot, s).memory.address  # noqa: E731
    saving = Snapshotter(model, allocate, lambda version: None, maker=replace(MAKER, release="1.1"))
    model.step()
    saving.stage(1)
    saving.wait()
    load(saving, memory, 1)
    assert not caplog.text
    other = Model()
    load(Snapshotter(other, allocate, lambda version: None, maker=MAKER), memory, 1)
    assert same(other.content(), model.content())
    assert "step 1 was saved by F 1.1 (a loop, format 3), and is restored by F 1.2 (a loop" in caplog.text


@pytest.mark.parametrize("makers", [(None, MAKER), (MAKER, None)])
def test_a_version_without_a_maker_is_older_and_an_older_adapter_does_not_look_for_one(makers):
    model, memory = Model(), RoleMemory()
    allocate = lambda slot, s: memory.allocate(slot, s).memory.address  # noqa: E731
    saving, loading = makers
    saving = Snapshotter(model, allocate, lambda version: None, maker=saving)
    model.step()
    saving.stage(1)
    saving.wait()
    other = Model()
    load(Snapshotter(other, allocate, lambda version: None, maker=loading), memory, 1)
    assert same(other.content(), model.content())


def test_state_without_numbers_and_lazy_views(parts):
    class Odd:
        empty, flipped = torch.empty(0), torch.tensor([1 + 2j, 3 - 1j]).conj()

        def tensors(self):
            yield StateTensor("empty", self.empty, (0, 1))
            yield StateTensor("flipped", self.flipped, (0,))
            yield StateTensor("negative", torch.imag(self.flipped), (0,))

        def envelope(self):
            return {}

        def envelope_holders(self):
            return (0,)

        def restore(self, tensors, envelope):
            self.restored = {name: tensor.clone() for name, tensor in tensors.items()}

    memory, state = RoleMemory(), Odd()
    snapshotter = Snapshotter(state, lambda slot, s: memory.allocate(slot, s).memory.address, print)
    snapshotter.stage(1)
    snapshotter.wait()
    successor = Snapshotter(state, lambda slot, s: memory.allocate(slot, s).memory.address, print)
    load(successor, memory, 1)
    assert state.restored["empty"].numel() == 0
    assert torch.equal(state.restored["flipped"], state.flipped)
    assert torch.equal(state.restored["negative"], torch.tensor([-2.0, 1.0]))


def test_a_new_worker_loads_what_a_dead_one_left(parts):
    model, memory, snapshotter, _ = parts
    model.step()
    snapshotter.stage(7)
    snapshotter.wait()
    other = Model()
    successor = Snapshotter(other, lambda slot, s: memory.allocate(slot, s).memory.address, lambda v: None)
    load(successor, memory, 7)
    assert same(other.content(), model.content())
    other.step()
    successor.stage(8)
    successor.wait()
    assert memory.versions() == [7, 8]


def test_a_flipped_bit_is_found_before_anything_is_touched(parts):
    model, memory, snapshotter, _ = parts
    snapshotter.stage(3)
    snapshotter.wait()
    _, buffer = memory.find(3)
    index = next(i for i, s in enumerate(buffer.segments) if s.nbytes > CHUNK)
    buffer.data(index)[CHUNK + 17] ^= 4
    model.step(snapshotter)
    content = model.content()
    with pytest.raises(CorruptSnapshot, match="chunk 1 of segment 0x1"):
        load(snapshotter, memory, 3)
    assert same(model.content(), content)


def test_a_newcomer_that_finds_a_flipped_bit_has_loaded_nothing_and_takes_another_copy(parts):
    model, memory, snapshotter, _ = parts
    for version in (3, 4):
        model.step()
        snapshotter.stage(version)
        snapshotter.wait()
    whole = model.content()
    slot, good = memory.find(4)
    bad = RoleMemory()
    spoilt = bad.allocate(slot, good.segments)
    spoilt.memory.view[:] = good.memory.view
    index = max(range(len(good.segments)), key=lambda i: good.segments[i].nbytes)
    spoilt.data(index)[-1] ^= 4
    other = Model()
    before = other.content()
    successor = Snapshotter(other, lambda slot, s: bad.allocate(slot, s).memory.address, lambda v: None)
    with pytest.raises(CorruptSnapshot, match="version 4: chunk"):
        load(successor, bad, 4)
    assert same(other.content(), before)
    load(successor, memory, 4)
    assert same(other.content(), whole)


def test_the_first_of_many_bad_chunks_is_named_whoever_finds_it():
    segments = [layout((role,), [("w", "uint8", (40 * CHUNK,), 40 * CHUNK)]) for role in (1, 2)]
    buffer = RoleMemory().allocate(0, segments)
    for index, segment in enumerate(segments):
        for chunk in range(segment.chunks):
            buffer.checksums(index)[chunk] = xxhash.xxh3_64_intdigest(bytes(CHUNK))
    verify(buffer)
    for index, chunk in ((1, 3), (0, 39), (0, 30), (1, 0)):
        buffer.data(index)[chunk * CHUNK + 5] = 1
    with pytest.raises(CorruptSnapshot, match=f"chunk 30 of segment {segments[0].id}"):
        verify(buffer)


@pytest.mark.parametrize(
    "sizes",
    [
        (CHUNK - 10, CHUNK, 0),  # the gap between two items, and one that is empty, end at a chunk's end
        (3, 0, CHUNK // 4 - 64, CHUNK // 4, 2 * CHUNK + 1, 7),
        (5 * CHUNK,),
        (CHUNK - 64, 64),
        (1, 0),
    ],
)
def test_checksums_are_those_of_the_bytes_in_the_buffer(sizes):
    tensors = {str(i): torch.randint(256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    segment = layout((0,), [(name, "uint8", t.shape, t.nbytes) for name, t in tensors.items()])
    buffer = RoleMemory().allocate(0, [segment])
    buffer.data(0)[:] = b"\xff" * segment.nbytes  # as in memory that had another layout
    everything = range(segment.chunks)
    for likely in ([], everything, everything[::2], everything):
        snapshot._copy_from_host(buffer, 0, tensors, likely)
        verify(buffer)
        for item in segment.items:
            there = buffer.data(0)[item.offset : item.offset + item.nbytes]
            assert bytes(there) == tensors[item.name].numpy().tobytes()
        tensors["0"][len(tensors["0"]) // 2] += 1  # in one chunk, while all others are what they were


def test_what_does_not_change_is_not_copied_again(parts, monkeypatch):
    """Unless the buffer is not known to have it, and never a change that came unannounced."""
    _, memory, _, _ = parts
    frozen, weight = torch.ones(2 * CHUNK, dtype=torch.uint8), torch.zeros(2 * CHUNK, dtype=torch.uint8)

    class Half(Model):
        def tensors(self):
            yield StateTensor("frozen", frozen, (0, 1))
            yield StateTensor("weight", weight, (0, 1))

    copied = []
    monkeypatch.setattr(
        snapshot.np, "copyto", lambda to, piece: copied.append(len(piece)) or copyto(to, piece)
    )
    snapshotter = Snapshotter(Half(), lambda slot, s: memory.allocate(slot, s).memory.address, print)

    def step(version):
        copied.clear()
        weight.add_(1)
        snapshotter.stage(version)
        snapshotter.wait()
        found, buffer = memory.find(version)
        verify(buffer)
        index = next(i for i, s in enumerate(buffer.segments) for item in s.items if item.name == "frozen")
        assert bytes(buffer.data(index)[: 4 * CHUNK]) == bytes(frozen.numpy()) + bytes(weight.numpy())
        return sum(copied) // CHUNK, found

    assert [step(version)[0] for version in range(4)] == [4, 4, 2, 2]
    frozen.data[CHUNK + 5] = 7  # as scripts write that keep a moving average
    assert [step(version)[0] for version in range(4, 8)] == [3, 3, 2, 2]
    memory.strike(step(8)[1])
    assert [step(version)[0] for version in range(9, 12)] == [4, 2, 2]


def test_a_copy_that_fails_leaves_its_buffer_torn_and_the_older_one_whole(parts):
    _, memory, snapshotter, staged = parts
    snapshotter.stage(0)
    snapshotter.wait()
    snapshotter._on_copy = lambda: (_ for _ in ()).throw(RuntimeError("device lost"))
    snapshotter.stage(1)
    with pytest.raises(RuntimeError, match="device lost"):
        snapshotter.wait()
    assert memory.versions() == [0] and staged == [0]


def test_rolled_back_versions_are_struck_off(parts):
    _, memory, snapshotter, _ = parts
    for version in (4, 5):
        snapshotter.stage(version)
        snapshotter.wait()
    memory.drop_after(4)
    assert memory.versions() == [4]
    snapshotter.stage(5)
    snapshotter.wait()
    assert memory.versions() == [4, 5]


def test_equal_layouts_on_every_holder():
    """What one DP peer lays out, another can load: same items, same offsets, same signature."""
    segments = []
    for _ in range(2):
        memory = RoleMemory()
        snapshotter = Snapshotter(
            Model(), lambda slot, s, m=memory: m.allocate(slot, s).memory.address, print
        )
        snapshotter._on_staged = lambda version: None
        snapshotter.stage(0)
        snapshotter.wait()
        segments.append({s.id: s.signature for s in memory.segments()})
    assert segments[0] == segments[1]


def test_a_fresh_buffer_is_torn():
    assert SnapshotBuffer.create([]).version == TORN


def test_the_envelope_of_the_newest_version_can_be_had_alone():
    store, model = NodeStore(), Model()
    memory = store.memory(3)
    snapshotter = Snapshotter(model, lambda slot, s: memory.allocate(slot, s).memory.address, lambda _: None)
    with pytest.raises(FtError, match="role 3"):
        store.envelope(3)
    for version in (7, 8):
        model.step(snapshotter)
        snapshotter.stage(version)
        snapshotter.wait()
    version, data, _ = store.envelope(3)
    assert (version, decode(data)) == (8, model.envelope())
    name = next(tensor.name for tensor in model.tensors())
    assert store.envelope(3, name)[2] == bytes(next(model.tensors()).tensor.view(torch.uint8).numpy())
    assert store.envelope(3, "another")[2] == b""
    memory.strike(memory.find(8)[0])
    version, data, _ = store.envelope(3)
    assert (version, decode(data)) == (7, {"lr": model.lr * 3})


@pytest.mark.parametrize("again", [True, False])
def test_a_successor_overwrites_a_buffer_that_nobody_else_can_write_to(parts, again):
    """It costs a second for each gigabyte or two to have the kernel give other memory."""
    model, memory, snapshotter, _ = parts
    for version in (1, 2):
        snapshotter.stage(version)
        snapshotter.wait()
    before = {slot: memory.slots[slot].memory.address for slot in (0, 1)}
    newest, _ = memory.find(2)
    successor = Snapshotter(
        model, lambda slot, s: memory.allocate(slot, s, again).memory.address, lambda _: None
    )
    load(successor, memory, 2)
    for version in (3, 4):
        successor.stage(version)
        successor.wait()
        verify(memory.find(version)[1])
    after = {slot: memory.slots[slot].memory.address for slot in (0, 1)}
    assert after[newest] == before[newest] and (after[1 - newest] == before[1 - newest]) is again
    model.late = torch.ones(7)
    successor.stage(5)
    successor.wait()
    assert memory.find(5)[1].memory.address not in (*before.values(), *after.values())


def test_memory_that_is_given_up_is_given_back():
    """A layout that changes in every step is new memory in every step, for the agent and for the worker."""
    model, store = Model(), NodeStore()
    memory = store.memory(0)
    snapshotter = Snapshotter(model, lambda slot, s: memory.allocate(slot, s).memory.address, lambda _: None)
    gc.collect()
    before = memory_files(os.getpid())
    lent = []
    for version in range(8):
        model.late = torch.ones(version + 1)
        snapshotter.stage(version)
        snapshotter.wait()
        lent.append(memory.find(version)[1].data(0))
    contents = [bytes(view) for view in lent]
    # Two buffers with a descriptor and a mapping on either side; mmap has another descriptor for its own.
    more = {"descriptor /memfd:ft-snapshot": 6, "mapping /memfd:ft-snapshot": 4}
    lent_only = {name: 6 for name in more}  # what is lent stays readable
    wait_for_value(lambda: grown(before), {name: more[name] + lent_only[name] for name in more})
    assert contents == [bytes(view) for view in lent]
    lent.clear()
    wait_for_value(lambda: grown(before), more)
    store.keep_only([], [])
    del snapshotter
    wait_for_value(lambda: memory_files(os.getpid()), before)


def grown(before):
    now = memory_files(os.getpid())
    return {name: now.get(name, 0) - before.get(name, 0) for name in now | before if "snapshot" in name}


def test_other_memory_behind_the_same_number_is_not_taken_for_the_same(parts):
    """A descriptor that was closed is used again. A worker may still have the old memory mapped."""
    model, memory, snapshotter, _ = parts
    other, elsewhere = Model(), RoleMemory()
    other.step()
    source = Snapshotter(other, lambda slot, s: elsewhere.allocate(slot, s).memory.address, print)
    model.step()
    for each in (snapshotter, source):
        each.stage(7)
        each.wait()
    other.step()
    source.stage(8)
    source.wait()
    slot, buffer = memory.find(7)
    again = memory.allocate(slot, segments := buffer.segments)  # as one fetched from another node
    snapshotter._buffers[slot].memory_address[:3] = again.memory.address[:3]
    _, fetched = elsewhere.find(8)
    with pytest.raises(FileNotFoundError, match="other memory by now"):
        SharedMemory.open([*again.memory.address[:3], buffer.memory.address[3]])
    for index in range(len(segments)):
        again.data(index)[:] = fetched.data(index)
        again.checksums(index)[:] = fetched.checksums(index)
    again.version = 7
    model.step(snapshotter)
    load(snapshotter, memory, 7)
    assert same(model.content(), other.content())


def test_an_envelope_that_grows_and_shrinks_keeps_its_memory(parts):
    model, memory, snapshotter, _ = parts
    allocated, allocate = [], snapshotter._allocate

    def counting(slot, segments):
        allocated.append(slot)
        return allocate(slot, segments)

    snapshotter._allocate = counting
    for version in range(30):
        model.lr = [0.1] * (3950 + version % 3 * 50)  # four bytes each: around 16 KiB
        snapshotter.stage(version)
        snapshotter.wait()
    assert len(allocated) <= 4
    other = Model()
    successor = Snapshotter(other, counting, lambda version: None)
    load(successor, memory, 29)
    assert other.lr == model.lr
    allocated.clear()
    for version in range(30, 40):
        other.lr = [0.1] * (3950 + version % 3 * 50)
        successor.stage(version)
        successor.wait()
    assert len(allocated) == 1, "of the two buffers, that which it has not loaded from"


def test_all_copies_have_ended_once_one_has_failed(monkeypatch):
    """What is restored next would go into one that is still being made, with checksums that match."""
    began, goes_on = threading.Event(), threading.Event()

    class Adopting(Model):
        def adopt(self, roles):
            return {role: other for role in roles}

    def copy(buffer, index, by_name, likely):
        if by_name["shard"] is not other.shard:
            raise OSError("no memory")
        began.set()
        goes_on.wait(60)

    own, other, memories = Adopting(), Model(), defaultdict(RoleMemory)
    monkeypatch.setattr(snapshot, "_copy_from_host", copy)
    staged = []
    snapshots = Snapshots(
        *(0, own, lambda role, slot, segments: memories[role].allocate(slot, segments).memory.address),
        *(lambda role, version: staged.append(role), lambda: None, lambda: False),
    )
    assert snapshots.adopt([1]) == {0, 1}
    snapshots.stage(1)
    began.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    with pytest.raises(OSError, match="no memory"):
        snapshots.wait()
    assert staged == [1]
