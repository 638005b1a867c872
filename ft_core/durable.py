"""The durable tier: snapshots written to storage by the agents with torch.distributed.checkpoint.

    DIR/step-00000500/segments/ID/      one DCP checkpoint of a segment, from its lowest holder that is there
    DIR/step-00000500/segments/ID.json  its checksums: copies of others may differ in what does not matter
    DIR/step-00000500/role-3.json       a role's segments; written last, renamed in place

A step is complete when every role's file is there; a torn one never hides an older complete one.
The training process takes no part: what is written is the agent's copy in host memory. The part of a role
whose replica group is away is written where its counterpart is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.manifest import Segment
from ft_core.memory import SnapshotBuffer
from ft_core.snapshot import ENVELOPE, verify
from ft_core.store import NodeStore, RoleMemory

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


def parts(
    store: NodeStore, role: int, version: int, plan: Mapping[str, Any], replicated: bool
) -> dict[int, Copy]:
    """What the node of `role` writes of `version`: a private copy, since training will overwrite it.

    Its own part, and those of roles that are away and have it as counterpart; empty if training was quicker.
    `replicated`: every replica group has all the state; else the role has adopted what those had alone.
    A part that cannot be made whole here is left out.
    """
    own = _copy(store.memory(role), version)
    if own is None:
        return {}
    found = {role: own}
    for name in (name for name, counterpart in plan["absent"].items() if counterpart == role):
        away, theirs = int(name), [row for row in own if int(name) in row[0].holders]
        if replicated:  # what comes back later is as its counterpart is, random states included
            for segment, data, sums in own:
                if away not in segment.holders:
                    holders = tuple(sorted(away if h == role else h for h in segment.holders))
                    theirs.append((replace(segment, holders=holders), data, sums))
        elif name in plan["adopted"]:
            shared = {segment.id for segment, _, _ in theirs}
            adopted = _copy(store.memory(away, adopted=True), version) or []
            theirs += [row for row in adopted if row[0].id not in shared]
        known, items = set(plan["catalogue"].get(name, ())), [i.name for row in theirs for i in row[0].items]
        if known <= {segment.id for segment, _, _ in theirs} and ENVELOPE in items:
            found[away] = sorted(theirs, key=lambda row: row[0].holders)
    return found


def _copy(memory: RoleMemory, version: int) -> Copy | None:
    if (found := memory.find(version)) is None:
        return None
    _, buffer = found
    copy = [
        (segment, bytearray(buffer.data(i)), list(buffer.checksums(i)))
        for i, segment in enumerate(buffer.segments)
    ]
    return copy if buffer.version == version else None


def write_role(directory: str, version: int, role: int, copy: Copy, plan: Mapping[str, Any]) -> None:
    """Write a role's part of the checkpoint of `version`. Raises OSError, whatever has gone wrong.

    `plan`: of the roles that take part, the lowest that holds a segment writes its data.
    """
    present = set(map(int, plan["roles"]))
    # A step that is done again without a replica group has another outcome: parts of both do not go together.
    trained_by = [[v, groups] for v, groups in plan["groups"]["membership"]["changes"] if 0 <= v < version]
    base = _path(directory, version)
    # One of an earlier run that is written over is not complete meanwhile.
    (base / f"role-{role}.json").unlink(missing_ok=True)
    for segment, data, sums in copy:
        writer = min((h for h in segment.holders if h in present), default=role)
        if writer == role and segment.items:
            _dcp("save", _tensors(segment, memoryview(data)), base / "segments" / segment.id)
            _write(base / "segments" / f"{segment.id}.json", sums)
    base.mkdir(parents=True, exist_ok=True)
    segments = [segment.to_json() for segment, _, _ in copy]
    _write(base / f"role-{role}.json", {"trained_by": trained_by, "segments": segments})
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
        part, first = (json.loads((base / f"role-{r}.json").read_text()) for r in (role, 0))
        if part["trained_by"] != first["trained_by"]:
            raise CorruptSnapshot("role 0's part is of a step that was trained by other replica groups")
        segments = [Segment.from_json(segment) for segment in part["segments"]]

    def fill(buffer: SnapshotBuffer) -> None:
        with _reading(base, role):
            for index, segment in enumerate(segments):
                if segment.items:
                    _dcp("load", _tensors(segment, buffer.data(index)), base / "segments" / segment.id)
                    sums = json.loads((base / "segments" / f"{segment.id}.json").read_text())
                    _store(buffer.checksums(index), sums)
            verify(buffer)

    return segments, fill


@contextlib.contextmanager
def _reading(base: Path, role: int) -> Iterator[None]:
    """Says what went wrong with a role's part, and sets it aside if it is damaged."""
    try:
        yield
    except (FileNotFoundError, ValueError, KeyError, TypeError, CorruptSnapshot) as error:
        part = base / f"role-{role}.json"
        with contextlib.suppress(OSError):  # storage that cannot be written; or another was quicker
            part.rename(part.with_suffix(".corrupt"))
        raise CorruptSnapshot(
            f"durable checkpoint {base}, role {role}: {error}; not used any more (see {part.stem}.corrupt)"
        ) from None
    except OSError as error:
        raise TransportError(f"durable checkpoint {base}, role {role}: {error}") from None


def _path(directory: str, version: int) -> Path:
    return Path(directory) / f"step-{version:08d}"


def _write(path: Path, content: Any) -> None:
    partial = path.with_name(f".{path.name}")
    with partial.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


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
