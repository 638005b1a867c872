"""The durable tier: snapshots written to storage by the agents with torch.distributed.checkpoint.

    DIR/step-00000500/segments/<segment id>/   one DCP checkpoint, written by its lowest holder
    DIR/step-00000500/role-3.json              layout and checksums of a role; written last, renamed in place

A step is complete when every role's file is there; a torn one never hides an older complete one.
The training process takes no part: what is written is the agent's copy in host memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.manifest import Segment
from ft_core.memory import SnapshotBuffer
from ft_core.snapshot import verify

KEEP = 2
"""Complete checkpoints that are kept; older ones are deleted."""

Copy = list[tuple[Segment, bytearray, list[int]]]


def complete_versions(directory: str, world_size: int) -> list[int]:
    """Versions for which every role's part is there, oldest first."""
    found = []
    for path in Path(directory).glob("step-*") if directory else ():
        if re.fullmatch(r"step-\d+", path.name) and all(
            (path / f"role-{role}.json").exists() for role in range(world_size)
        ):
            found.append(int(path.name[5:]))
    return sorted(found)


def copy_of(buffer: SnapshotBuffer, version: int) -> Copy | None:
    """A private copy of a snapshot, since training will overwrite it; None if it did already."""
    copy = [
        (segment, bytearray(buffer.data(i)), list(buffer.checksums(i)))
        for i, segment in enumerate(buffer.segments)
    ]
    return copy if buffer.version == version else None


def write_role(directory: str, version: int, role: int, copy: Copy) -> None:
    """Write a role's part of the checkpoint of `version`. Raises OSError, whatever has gone wrong."""
    base = _path(directory, version)
    # One of an earlier run that is written over is not complete meanwhile.
    (base / f"role-{role}.json").unlink(missing_ok=True)
    for segment, data, _ in copy:
        if segment.holders[0] == role and segment.items:
            _dcp("save", _tensors(segment, memoryview(data)), base / "segments" / segment.id)
    rows = [{"segment": segment.to_json(), "checksums": sums} for segment, _, sums in copy]
    partial = base / f".role-{role}.json"
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w") as file:
        json.dump(rows, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(base / f"role-{role}.json")
    if role == 0:
        _prune(directory, version)


def open_role(
    directory: str, version: int, role: int
) -> tuple[list[Segment], Callable[[SnapshotBuffer], None]]:
    """The layout of a role's part, and a function that reads it into a buffer of that layout.

    Both raise TransportError when the storage does not answer, and CorruptSnapshot when what was read is not
    what was saved: the checkpoint does not count as complete from then on.
    """
    base = _path(directory, version)
    with _reading(base, role):
        rows = json.loads((base / f"role-{role}.json").read_text())
    segments = [Segment.from_json(row["segment"]) for row in rows]

    def fill(buffer: SnapshotBuffer) -> None:
        with _reading(base, role):
            for index, segment in enumerate(segments):
                if segment.items:
                    _dcp("load", _tensors(segment, buffer.data(index)), base / "segments" / segment.id)
                _store(buffer.checksums(index), rows[index]["checksums"])
            verify(buffer)

    return segments, fill


@contextlib.contextmanager
def _reading(base: Path, role: int) -> Iterator[None]:
    """Says what went wrong with a role's part, and sets it aside if it is damaged."""
    try:
        yield
    except OSError as error:
        raise TransportError(f"durable checkpoint {base}, role {role}: {error}") from None
    except (ValueError, CorruptSnapshot) as error:
        part = base / f"role-{role}.json"
        with contextlib.suppress(OSError):  # storage that cannot be written; or another was quicker
            part.rename(part.with_suffix(".corrupt"))
        raise CorruptSnapshot(
            f"durable checkpoint {base}, role {role}: {error}; not used any more (see {part.stem}.corrupt)"
        ) from None


def _path(directory: str, version: int) -> Path:
    return Path(directory) / f"step-{version:08d}"


def _store(table: memoryview, values: Sequence[int]) -> None:
    for index, value in enumerate(values):
        table[index] = value


def _tensors(segment: Segment, data: memoryview) -> dict[str, torch.Tensor]:
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return {
        item.name: flat[item.offset : item.offset + item.nbytes]
        .view(getattr(torch, item.dtype))
        .view(item.shape)
        for item in segment.items
    }


def _dcp(action: Literal["save", "load"], tensors: dict[str, torch.Tensor], path: Path) -> None:
    # Imported here, since it is a third of what an agent would import, and few jobs use it.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "no process group": that is the intention here
        try:
            getattr(dcp, action)(tensors, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:  # derives from BaseException, and hides what happened
            cause, _ = next(iter(error.failures.values()))
            if action == "save" or isinstance(cause, OSError):
                raise OSError(str(cause)) from error
            raise CorruptSnapshot(str(cause)) from error


def _prune(directory: str, newest: int) -> None:
    paths = sorted(p for p in Path(directory).glob("step-*") if p.name < f"step-{newest:08d}")
    complete = [p for p in paths if (p / "role-0.json").exists()]
    for path in complete[:-KEEP]:
        shutil.rmtree(path, ignore_errors=True)
