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


def test_one_that_is_written_over_is_not_complete(tmp_path: Path, store: NodeStore):
    base = write(tmp_path, 5, store)
    segments = base / "segments"
    segments.rename(base / "elsewhere")
    segments.touch()  # where a directory has to be
    with pytest.raises(OSError, match="segments"):
        write(tmp_path, 5, store)
    assert durable.complete_versions(str(tmp_path), 1) == []
