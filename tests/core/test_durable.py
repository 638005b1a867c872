"""The durable tier's files: what is torn or damaged is noticed, and hides no older checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_core import durable
from ft_core.adapter import StateTensor
from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.snapshot import Snapshotter
from ft_core.store import NodeStore, RoleMemory


class Model:
    def __init__(self) -> None:
        self.weight = torch.arange(1000, dtype=torch.float32)

    def tensors(self) -> Iterator[StateTensor]:
        yield StateTensor("weight", self.weight, (0,))

    def envelope(self) -> dict[str, int]:
        return {"step": 1}

    def envelope_holders(self) -> tuple[int]:
        return (0,)


@pytest.fixture
def store() -> NodeStore:
    """With version 1 of role 0."""
    store = NodeStore()
    memory = store.memory(0)
    snapshotter = Snapshotter(
        Model(),  # type: ignore[arg-type]
        lambda slot, segments: memory.allocate(slot, segments).memory.address,
        lambda version: None,
    )
    snapshotter.stage(1)
    snapshotter.wait()
    return store


def plan(*changes: Any) -> dict[str, Any]:
    about = {"absent": {}, "adopted": {}, "catalogue": {}, "groups": {"membership": {"changes": [*changes]}}}
    return {"roles": {"0": "node0"}, **about}


def write(directory: Path, version: int, store: NodeStore) -> Path:
    [(role, copy)] = durable.parts(store, 0, 1, plan(), replicated=False).items()
    durable.write_role(str(directory), version, role, copy, plan())
    return directory / f"step-{version:08d}"


def read(directory: Path, version: int) -> list[bytes]:
    segments, fill = durable.open_role(str(directory), version, 0)
    buffer = RoleMemory().allocate(0, segments)
    fill(buffer)
    return [bytes(buffer.data(i)) for i in range(len(segments))]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(8.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)


def test_what_was_written_is_read(tmp_path: Path, store: NodeStore):
    write(tmp_path, 5, store)
    _, snapshot = store.memory(0).find(1) or pytest.fail("there is no snapshot")
    assert read(tmp_path, 5) == [bytes(snapshot.data(i)) for i in range(len(snapshot.segments))]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, "segments/0x1-*/*.distcp"),
        (truncate, "segments/0x1-*/*.distcp"),
        (truncate, "segments/0x1-*/.metadata"),
        (Path.unlink, "segments/0x1-*/.metadata"),
        (truncate, "role-0.json"),
        (Path.unlink, "segments/0x1-*.json"),
    ],
)
def test_a_damaged_one_gives_way_to_an_older_one(damage, what: str, tmp_path: Path, store: NodeStore):
    write(tmp_path, 5, store)
    [path] = write(tmp_path, 10, store).glob(what)
    damage(path)
    with pytest.raises(CorruptSnapshot, match=r"step-00000010, role 0: .* not used any more"):
        read(tmp_path, 10)
    assert durable.complete_versions(str(tmp_path), 1) == [5]
    write(tmp_path, 10, store)
    assert durable.complete_versions(str(tmp_path), 1) == [5, 10]


def test_storage_that_does_not_answer_costs_no_checkpoint(tmp_path: Path, store: NodeStore):
    base = write(tmp_path, 5, store)
    [path] = base.glob("segments/0x1-*/*.distcp")
    path.unlink()
    path.mkdir()  # reading it fails with an OSError
    with pytest.raises(TransportError, match="Is a directory"):
        read(tmp_path, 5)
    assert durable.complete_versions(str(tmp_path), 1) == [5]


def test_parts_of_a_step_that_was_done_twice_do_not_go_together(tmp_path: Path, store: NodeStore):
    """Once with all replica groups, then without one. What an epoch changes later makes no difference."""
    write(tmp_path, 5, store)
    part = durable.parts(store, 0, 1, plan(), replicated=False)[0]
    for changes, readable in (([[5, [0]]], True), ([[4, [0]]], False)):
        durable.write_role(str(tmp_path), 5, 1, part, plan(*changes))
        if readable:
            durable.open_role(str(tmp_path), 5, 1)
        else:
            with pytest.raises(CorruptSnapshot, match="trained by other replica groups"):
                durable.open_role(str(tmp_path), 5, 1)


def test_the_part_of_a_role_that_is_away(store: NodeStore):
    """Its counterpart has all the state but for what is each role's own, or has adopted it."""
    about = plan() | {"absent": {"1": 0}}
    own, theirs = durable.parts(store, 0, 1, about, replicated=True).values()
    assert [segment.holders for segment, *_ in own] == [(0,)]
    assert [segment.holders for segment, *_ in theirs] == [(1,)]
    assert [row[1:] for row in own] == [row[1:] for row in theirs]
    about["adopted"] = about["absent"]
    assert list(durable.parts(store, 0, 1, about, replicated=False)) == [0], "nothing was adopted"
    segments = [segment for segment, *_ in theirs]
    buffer = store.memory(1, adopted=True).allocate(0, segments)
    buffer.version = 1
    assert list(durable.parts(store, 0, 1, about, replicated=False)) == [0, 1]
    about["catalogue"] = {"1": {segments[0].id: [1], "another": [1, 2]}}
    assert list(durable.parts(store, 0, 1, about, replicated=False)) == [0], "there was more"
    assert durable.parts(store, 0, 2, about, replicated=True) == {}


def test_one_that_is_written_over_is_not_complete(tmp_path: Path, store: NodeStore):
    base = write(tmp_path, 5, store)
    segments = base / "segments"
    segments.rename(base / "elsewhere")
    segments.touch()  # where a directory has to be
    with pytest.raises(OSError, match="segments"):
        write(tmp_path, 5, store)
    assert durable.complete_versions(str(tmp_path), 1) == []
