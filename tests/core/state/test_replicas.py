"""The store of pushed copies: two slots, torn pushes, epochs, readers that outlive their slot."""

from __future__ import annotations

import threading

import pytest

from ft_core.errors import TransportError
from ft_core.state.manifest import Segment, layout
from ft_core.state.replicas import ReplicaStore


def make(role: int = 0, nbytes: int = 100) -> Segment:
    return layout((role,), [("w", "uint8", (nbytes,), nbytes)] if nbytes else [])


def put(store: ReplicaStore, segment: Segment, version: int, fill: int = 0, epoch: int = 0) -> None:
    room = store.begin(segment, version, epoch, [fill])
    assert room is not None and room.data.nbytes == segment.nbytes
    room.data[:] = bytes([fill]) * segment.nbytes
    store.commit(segment, version)


def read(store: ReplicaStore, segment: Segment, version: int) -> bytes | None:
    found = store.find(segment.id, version)
    return None if found is None else bytes(found[1])


def memories(store: ReplicaStore, segment: Segment) -> set[int]:
    return {id(slot.memory) for slot in store._slots[segment.id] if slot.memory is not None}


def test_the_two_newest_versions_are_held() -> None:
    store, segment = ReplicaStore(), make()
    for version in range(5):
        put(store, segment, version, fill=version)
    assert store.versions() == {segment.id: [3, 4]}
    assert read(store, segment, 4) == b"\4" * 100
    assert read(store, segment, 3) == b"\3" * 100
    assert read(store, segment, 2) is None
    assert store.find("other", 4) is None and store.segment("other") is None
    assert store.segment(segment.id) == segment


def test_an_equal_copy_is_not_taken_again() -> None:
    store, segment = ReplicaStore(), make()
    put(store, segment, 1, fill=7)
    assert store.begin(segment, 1, 0, [7]) is None
    for other, version, checksums in ((segment, 2, [7]), (segment, 1, [8]), (make(nbytes=90), 1, [7])):
        assert other.id == segment.id
        assert store.begin(other, version, 0, checksums) is not None
        store.discard(other, version)
    assert store.begin(segment, 1, 0, [7]) is None


def test_torn_pushes_never_harm_the_newest_copy() -> None:
    store, segment = ReplicaStore(), make()
    put(store, segment, 1, fill=1)
    put(store, segment, 2, fill=2)
    for version in (3, 4):
        torn = store.begin(segment, version, 0, [9])
        assert torn is not None
        torn.data[:50] = bytes(50)
        assert store.versions() == {segment.id: [2]}
        assert store.find(segment.id, version) is None
        store.discard(segment, version)
    assert read(store, segment, 2) == b"\2" * 100
    put(store, segment, 4, fill=4)
    assert store.versions() == {segment.id: [2, 4]}


def test_steady_state_reuses_memory() -> None:
    store, segment = ReplicaStore(), make()
    put(store, segment, 1)
    put(store, segment, 2)
    used = memories(store, segment)
    put(store, segment, 3)
    put(store, make(nbytes=60), 4)  # a layout that fits
    assert memories(store, segment) == used
    put(store, make(nbytes=10_000), 5)
    put(store, make(nbytes=10_000), 6)
    assert read(store, make(nbytes=10_000), 6) == bytes(10_000)


def test_a_reader_never_sees_its_bytes_change() -> None:
    store, segment = ReplicaStore(), make()
    put(store, segment, 1, fill=1)
    found = store.find(segment.id, 1)
    assert found is not None
    for version in range(2, 6):
        put(store, segment, version, fill=version)
    put(store, make(role=1), 9)
    assert store.segment(segment.id) is None
    assert bytes(found[1]) == b"\1" * 100
    assert found[0] == segment and list(found[2]) == [1]
    with pytest.raises(TypeError):
        found[1][0] = 0


def test_what_is_replicated_elsewhere_by_now_is_given_up() -> None:
    """Two segments came here, then places changed, and one of them goes to another node."""
    store, left, kept, coming = ReplicaStore(), make(role=0), make(role=1), make(role=2)
    for version in (1, 2):
        put(store, left, version)
        put(store, kept, version)
    assert store.begin(coming, 2, 0, [0]) is not None
    for version in (3, 4):
        put(store, kept, version)
        assert store.versions()[left.id] == [1, 2], (
            "a version in which some other copy is corrupt may be needed"
        )
    put(store, kept, 5)
    assert set(store._slots) == {kept.id, coming.id}
    store.commit(coming, 2)
    assert store.versions() == {kept.id: [4, 5], coming.id: [2]}


def test_stale_epochs_are_refused() -> None:
    store, segment = ReplicaStore(epoch=2), make()
    with pytest.raises(TransportError, match=r"stale sender.*epoch 1.*epoch 2"):
        store.begin(segment, 1, 1, [0])
    put(store, segment, 1, epoch=2)
    put(store, segment, 2, epoch=3)  # the sender heard of the new epoch first
    assert store.begin(segment, 3, 3, [0]) is not None
    store.epoch = 4
    with pytest.raises(TransportError, match="too late"):
        store.commit(segment, 3)
    assert store.versions() == {segment.id: [2]}


def test_roll_back_keeps_what_the_epoch_itself_has_brought() -> None:
    """Others may have begun it, and done a step, before this node has heard of its plan."""
    store, segment = ReplicaStore(epoch=2), make()
    put(store, segment, 5, epoch=2)
    store.epoch = 3
    put(store, segment, 6, epoch=3)
    store.drop_after(4)
    assert store.versions() == {segment.id: [6]}


def test_memory_of_segments_that_nobody_pushes_any_more_is_given_back_after_a_roll_back() -> None:
    store, old, new = ReplicaStore(), make(0), make(1)
    for version in (8, 9):
        put(store, old, version)
    store.epoch = 1
    store.drop_after(3)
    for version in (4, 5, 6):
        put(store, new, version, epoch=1)
    assert list(store._slots) == [new.id]


def test_roll_back_drops_newer_versions() -> None:
    store, one, two = ReplicaStore(), make(0), make(1)
    for version in (1, 2):
        put(store, one, version, fill=version)
    put(store, two, 2)
    coming = store.begin(two, 3, 0, [0])
    assert coming is not None
    store.epoch = 1
    store.drop_after(1)
    assert store.versions() == {one.id: [1]}
    assert store.segment(two.id) is None
    put(store, two, 2, fill=2, epoch=1)  # must not share memory with the push that has not stopped yet
    coming.data[:] = b"\xff" * 100
    with pytest.raises(TransportError, match="dropped"):
        store.commit(two, 3)
    store.discard(two, 3)
    assert read(store, two, 2) == b"\2" * 100
    assert read(store, one, 1) == b"\1" * 100


def test_the_same_version_is_held_once() -> None:
    store, segment = ReplicaStore(), make()
    put(store, segment, 1, fill=1)
    put(store, segment, 1, fill=2)
    assert store.versions() == {segment.id: [1]}
    assert read(store, segment, 1) == b"\2" * 100


def test_one_push_at_a_time() -> None:
    store, segment = ReplicaStore(), make()
    assert store.begin(segment, 1, 0, [0]) is not None
    with pytest.raises(TransportError, match="in progress"):
        store.begin(segment, 2, 0, [0])
    store.discard(segment, 1)
    put(store, segment, 2)
    with pytest.raises(TransportError, match="dropped"):
        store.commit(segment, 3)


def test_empty_segment() -> None:
    store, segment = ReplicaStore(), make(nbytes=0)
    assert store.begin(segment, 1, 0, []) is not None
    store.commit(segment, 1)
    assert read(store, segment, 1) == b""


def test_more_memory_than_there_is_is_refused() -> None:
    store, segment = ReplicaStore(), make(nbytes=1 << 62)
    with pytest.raises(TransportError, match="no memory"):
        store.begin(segment, 1, 0, [0])
    assert store.versions() == {}


def test_readers_and_writers_at_once() -> None:
    store, segment = ReplicaStore(), make(nbytes=50_000)
    put(store, segment, 0)
    mixed: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for version in store.versions()[segment.id]:
                data = read(store, segment, version)
                if data is not None and set(data) != {version % 256}:
                    mixed.append(version)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 300):
        put(store, segment, version, fill=version % 256)
    done.set()
    for reader in readers:
        reader.join()
    assert not mixed
