"""The durable tier's files: what is torn or damaged is noticed, and hides no older checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ft_core import durable
from ft_core.adapter import StateTensor
from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.memory import SnapshotBuffer
from ft_core.snapshot import Snapshotter
from ft_core.store import RoleMemory


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
def snapshot() -> SnapshotBuffer:
    memory = RoleMemory()
    snapshotter = Snapshotter(
        Model(),  # type: ignore[arg-type]
        lambda slot, segments: memory.allocate(slot, segments).memory.address,
        lambda version: None,
    )
    snapshotter.stage(1)
    snapshotter.wait()
    found = memory.find(1)
    assert found is not None
    return found[1]


def write(directory: Path, version: int, snapshot: SnapshotBuffer) -> Path:
    copy = durable.copy_of(snapshot, 1)
    assert copy is not None
    durable.write_role(str(directory), version, 0, copy)
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


def test_what_was_written_is_read(tmp_path: Path, snapshot: SnapshotBuffer):
    write(tmp_path, 5, snapshot)
    assert read(tmp_path, 5) == [bytes(snapshot.data(i)) for i in range(len(snapshot.segments))]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, "segments/0x1-*/*.distcp"),
        (truncate, "segments/0x1-*/*.distcp"),
        (truncate, "segments/0x1-*/.metadata"),
        (Path.unlink, "segments/0x1-*/.metadata"),
        (truncate, "role-0.json"),
    ],
)
def test_a_damaged_one_gives_way_to_an_older_one(damage, what: str, tmp_path: Path, snapshot: SnapshotBuffer):
    write(tmp_path, 5, snapshot)
    [path] = write(tmp_path, 10, snapshot).glob(what)
    damage(path)
    with pytest.raises(CorruptSnapshot, match=r"step-00000010, role 0: .* not used any more"):
        read(tmp_path, 10)
    assert durable.complete_versions(str(tmp_path), 1) == [5]
    write(tmp_path, 10, snapshot)
    assert durable.complete_versions(str(tmp_path), 1) == [5, 10]


def test_storage_that_does_not_answer_costs_no_checkpoint(tmp_path: Path, snapshot: SnapshotBuffer):
    base = write(tmp_path, 5, snapshot)
    [path] = base.glob("segments/0x1-*/*.distcp")
    path.unlink()
    path.mkdir()  # reading it fails with an OSError
    with pytest.raises(TransportError, match="Is a directory"):
        read(tmp_path, 5)
    assert durable.complete_versions(str(tmp_path), 1) == [5]


def test_one_that_is_written_over_is_not_complete(tmp_path: Path, snapshot: SnapshotBuffer):
    base = write(tmp_path, 5, snapshot)
    segments = base / "segments"
    segments.rename(base / "elsewhere")
    segments.touch()  # where a directory has to be
    with pytest.raises(OSError, match="segments"):
        write(tmp_path, 5, snapshot)
    assert durable.complete_versions(str(tmp_path), 1) == []
