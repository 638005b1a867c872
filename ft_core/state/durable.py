"""The durable tier: snapshots that the agents write to storage, as plain bytes with their layout in JSON.

    DIR/step-00000500-00003-1f0c9a2b-8/segments/ID    a segment, from its lowest holder that is there: a line
                                                      with its layout and checksums, then its bytes
    DIR/step-00000500-00003-1f0c9a2b-8/role-3.json    a role's segments; written last, renamed in place

A directory is of one past: step 500 as epoch 3 of one job, of 8 roles, has it. A step that is done again may
come out differently, and belongs to a later epoch; what a node writes that the job has given up belongs to an
earlier one. Parts of two pasts never meet. A checkpoint is complete when every role's file is there; a torn
one never hides an older complete one.
The training process takes no part: what is written is the agent's copy in host memory. The part of a role
whose replica group is away is written where its counterpart is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_64_hexdigest

from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.protocol import checkpoint_names
from ft_core.protocol.checkpoint_names import CheckpointId, Past, parse
from ft_core.protocol.messages import NodePlan
from ft_core.state.checksums import verify
from ft_core.state.manifest import ENVELOPE, Segment
from ft_core.state.memory import SnapshotBuffer, anonymous, copy_bytes
from ft_core.state.store import NodeStore, RoleMemory

log = logging.getLogger(__name__)

KEEP = 2
"""Complete checkpoints that are kept, and incomplete ones that others may still be writing."""

_PIECE = 16 << 20
"""Bytes that are copied, read or written at a time."""
_MAX_HEADER = 256 << 20
_SURE = 300.0
"""Seconds in which others have written a part of some checkpoint, where there is storage that all see."""
_SEGMENTS = "segments"


def name_of(version: int, plan: NodePlan) -> str:
    """The directory of `version` as the epoch of `plan` has it."""
    # INV-11 (durable): parts of another epoch, or of another job, never complete this one.
    world_size = len(plan.roles) + len(plan.absent)
    return checkpoint_names.name_of(CheckpointId(version, plan.epoch, plan.job, world_size))


def version_of(name: str) -> int:
    """Inverse of `name_of`, for the version."""
    return parse(name).version


def complete(directory: str, world_size: int) -> list[str]:
    """Names of the checkpoints in which every role's part is there, oldest first.

    Lists each checkpoint's directory and looks at no file. Raises OSError when the storage does not answer.
    """
    wanted = {_part(role) for role in range(world_size)}
    return [
        name
        for name in _names(directory, world_size)
        if wanted <= set(_list_checkpoint(Path(directory, name)))
    ]


def other_sizes(directory: str, world_size: int) -> list[int]:
    """The numbers of roles of the checkpoints that are of another number. Raises OSError."""
    return sorted(checkpoint_names.sizes(_list(Path(directory))) - {world_size})


@dataclass(frozen=True)
class Part:
    """What is written of a role: its segments' names, and the content of those that no other role writes."""

    segments: tuple[str, ...]
    content: tuple[tuple[Segment, mmap.mmap, list[int]], ...]


@dataclass(frozen=True)
class _Held:
    """Where a segment of a part lies."""

    segment: Segment
    buffer: SnapshotBuffer
    index: int

    def copy(self, version: int) -> tuple[mmap.mmap, list[int]] | None:
        """A private copy, since training will overwrite it; None if it has."""
        source, sums = self.buffer.data(self.index), list(self.buffer.checksums(self.index))
        data = anonymous(len(source))
        with memoryview(data) as target:
            for at in range(0, len(source), _PIECE):
                piece = source[at : at + _PIECE]
                copy_bytes(target[at : at + len(piece)], piece)
                if self.buffer.version != version:
                    return None
        return data, sums


def parts(store: NodeStore, role: int, version: int, plan: NodePlan, replicated: bool) -> dict[int, Part]:
    """What the node of `role` writes of `version`.

    Its own part, and those of roles that are away and have it as counterpart; empty if training was quicker.
    `replicated`: every replica group has all the state; else the role has adopted what those had alone.
    A part that cannot be made whole here is left out.
    """
    own = _held(store.memory(role), version)
    if not own:
        return {}
    found = {role: own}
    for away in (away for away, counterpart in plan.absent.items() if counterpart == role):
        theirs = [held for held in own if away in held.segment.holders]
        if replicated:  # what comes back later is as its counterpart is, random states included
            for held in own:
                if away not in held.segment.holders:
                    holders = tuple(sorted(away if h == role else h for h in held.segment.holders))
                    theirs.append(replace(held, segment=replace(held.segment, holders=holders)))
        elif away in plan.adopted:
            shared = {held.segment.id for held in theirs}
            adopted = _held(store.memory(away, adopted=True), version)
            theirs += [held for held in adopted if held.segment.id not in shared]
        known = set(plan.away.get(away, ()))
        items = [item.name for held in theirs for item in held.segment.items]
        if known <= {held.segment.id for held in theirs} and ENVELOPE in items:
            found[away] = sorted(theirs, key=lambda held: held.segment.holders)
    copies: dict[tuple[int, int], tuple[mmap.mmap, list[int]]] = {}
    result = {}
    for each, rows in found.items():
        content = []
        for held in rows:
            # Of the roles that take part, the lowest that holds a segment writes its data.
            if min((h for h in held.segment.holders if h in plan.roles), default=each) != each:
                continue
            key = (id(held.buffer), held.index)
            if key not in copies:
                if (copy := held.copy(version)) is None:
                    break
                copies[key] = copy
            content.append((held.segment, *copies[key]))
        else:
            result[each] = Part(tuple(held.segment.id for held in rows), tuple(content))
    return result


def _held(memory: RoleMemory, version: int) -> list[_Held]:
    if (found := memory.find(version)) is None:
        return []
    buffer = found[1]
    return [_Held(segment, buffer, i) for i, segment in enumerate(buffer.segments)]


def save(
    directory: str,
    world_size: int,
    store: NodeStore,
    role: int,
    version: int,
    plan: NodePlan,
    replicated: bool,
) -> list[int]:
    """Write what the node of `role` has to write of `version` (see `parts`); returns the roles written.

    Raises OSError or TransportError: then nobody can complete this checkpoint, and its data are deleted
    unless the others' are elsewhere.
    """
    name = name_of(version, plan)
    try:
        found = parts(store, role, version, plan, replicated)
        if role not in found:
            raise TransportError(f"step {version} is no longer in memory: training or a recovery was quicker")
        if role == min(plan.roles):
            prune(directory, name, plan)
        for each, part in found.items():
            write_role(directory, name, each, part)
    except (OSError, TransportError):
        _remove(Path(directory, name))
        with contextlib.suppress(OSError):
            prune(directory, name, plan, failed=True)
        raise
    if seconds := _alone(directory, name, role, plan):
        with contextlib.suppress(OSError):
            prune(directory, name, plan)
        raise TransportError(
            f"in {directory} there are no parts of other nodes, after {seconds:.0f} s: it is no storage that "
            "all nodes see, and no checkpoint there is complete; give another --ft-durable-dir"
        )
    return list(found)


def _alone(directory: str, name: str, role: int, plan: NodePlan) -> float:
    """Seconds for which the node of `role` has written alone, as far as that is sure; else 0. Looked for are
    the parts of a few roles: all nodes ask the same storage."""
    own = [each for each, node in plan.roles.items() if node == plan.roles[role]]
    others = sorted(plan.roles.keys() - set(own))
    if not others or role != min(own):
        return 0.0
    few = {others[0], others[-1], min((each for each in others if each > role), default=others[0])}
    times = []
    for each in _names(directory, parse(name).roles):
        if parse(each)[1:] == parse(name)[1:]:
            if any(Path(directory, each, _part(other)).exists() for other in few):
                return 0.0
            with contextlib.suppress(OSError):  # deleted since
                times.append(Path(directory, each, _part(role)).stat().st_mtime)
    seconds = max(times, default=0.0) - min(times, default=0.0)
    return seconds if seconds >= _SURE else 0.0


def write_role(directory: str, name: str, role: int, part: Part) -> None:
    """Write a role's part of the checkpoint `name`. Raises OSError."""
    segments = Path(directory, name, _SEGMENTS)
    segments.mkdir(parents=True, exist_ok=True)
    _sync(Path(directory))
    for segment, data, sums in part.content:
        with _writing(segments / segment.id) as file, memoryview(data) as content:
            _write(file, memoryview(_header({"segment": segment.to_json(), "checksums": sums})))
            _write(file, content[: segment.nbytes])
    with _writing(segments.with_name(_part(role))) as file:
        _write(file, memoryview(json.dumps({"segments": part.segments}).encode()))


def prune(directory: str, name: str, plan: NodePlan, *, failed: bool = False) -> None:
    """Make room for the checkpoint `name`, which is about to be written here: see `superfluous`.

    Several may do this at once: whoever comes later finds less. Raises OSError.
    """
    world_size = parse(name).roles
    names, whole = _names(directory, world_size), complete(directory, world_size)
    for each in superfluous(names, whole, name, plan.past, failed=failed):
        _remove(Path(directory, each))


def superfluous(
    names: Sequence[str], whole: Sequence[str], name: str, past: Past, *, failed: bool
) -> list[str]:
    """Which of the checkpoints `names` (oldest first, of one size; `whole` are complete) are of no use to
    anybody, once `name`, of the job with this `past`, is about to be written, or has `failed`.

    Complete ones, but for the newest `KEEP` steps of its past, with what others had before it began, and of
    what it has given up; another job's that are newer than where it began are that job's. Of those that are
    incomplete: what is older than the newest complete one, and all but the newest `KEEP` others, which
    somebody may still be writing; if `name` has failed, all that are not from the future of its job. Nodes
    that died left them.
    """
    own, before = past.own(whole), past.before(whole)
    line = sorted({*own, *(n for n in before if not past.gave_up(version_of(n)))}, key=parse)
    given_up = [n for n in whole if n not in line and (n in before or parse(n).job == past.job)]
    kept = _newest(line)
    torn = [n for n in names if n not in whole and n != name and not _after(n, name)]
    if not failed:
        torn = [n for n in torn if n not in torn[-KEEP:] or (kept and parse(n) < parse(kept[-1]))]
    useless = {*line, *given_up} - {*kept, *_newest(given_up)}
    return [n for n in whole if n in useless] + torn


def _newest(names: Sequence[str]) -> list[str]:
    """One of each of the newest `KEEP` steps: one that was written again counts as its newest."""
    found = {version_of(name): name for name in names}
    return [found[version] for version in sorted(found)[-KEEP:]]


def _after(name: str, other: str) -> bool:
    """Whether a checkpoint is of the same job as the `other`, and was begun later."""
    one, two = parse(name), parse(other)
    return one.job == two.job and (one.epoch, one.version) > (two.epoch, two.version)


def open_role(directory: str, name: str, role: int) -> tuple[list[Segment], Callable[[SnapshotBuffer], None]]:
    """The layout of a role's part, and a function that reads it into a buffer of that layout.

    Both raise TransportError when the storage does not answer, and CorruptSnapshot when what was read is not
    what was saved: the checkpoint does not count as complete from then on.
    """
    base = Path(directory, name)
    with _reading(base, role):
        names = json.loads((base / _part(role)).read_bytes())["segments"]
        paths = [base / _SEGMENTS / Path(name).name for name in names]
        found = [_layout(path) for path in paths]

    def read(buffer: SnapshotBuffer) -> None:
        for index, (path, (_, sums, start)) in enumerate(zip(paths, found, strict=True)):
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                _read(file, buffer.data(index), path)
            table = buffer.checksums(index)
            for chunk, value in enumerate(sums):
                table[chunk] = value
        verify(buffer)

    def fill(buffer: SnapshotBuffer) -> None:
        with _reading(base, role):
            try:
                read(buffer)
            except CorruptSnapshot as error:  # it may be this node that reads badly, and others depend on it
                log.warning("durable checkpoint %s, role %d: %s; it is read once more", base, role, error)
                for path in paths:
                    _forget_cached(path)
                read(buffer)

    return [segment for segment, _, _ in found], fill


def _header(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return f"{xxh3_64_hexdigest(text)} ".encode() + text + b"\n"


def _layout(path: Path) -> tuple[Segment, Sequence[int], int]:
    """What the segment in a file is, its checksums, and where its bytes begin. Raises CorruptSnapshot."""
    with path.open("rb") as file:
        line = file.readline(_MAX_HEADER)
        size = os.fstat(file.fileno()).st_size
    digest, _, text = line.removesuffix(b"\n").partition(b" ")
    if xxh3_64_hexdigest(text).encode() != digest:
        raise CorruptSnapshot(f"{path.name} does not begin with a layout and its checksum")
    content = json.loads(text)
    segment, sums = Segment.from_json(content["segment"]), content["checksums"]
    if len(sums) != segment.chunks:
        raise CorruptSnapshot(f"{path.name} has {len(sums)} checksums for {segment.chunks} chunks")
    if size != len(line) + segment.nbytes:
        raise CorruptSnapshot(f"{path.name} has {size} bytes instead of {len(line) + segment.nbytes}")
    return segment, sums, len(line)


@contextlib.contextmanager
def _reading(base: Path, role: int) -> Iterator[None]:
    """Says what went wrong with a role's part, and sets it aside if it is damaged."""
    try:
        yield
    except (FileNotFoundError, ValueError, KeyError, TypeError, CorruptSnapshot) as error:
        part = base / _part(role)
        with contextlib.suppress(OSError):  # storage that cannot be written; or another was quicker
            part.rename(part.with_suffix(".corrupt"))
        raise CorruptSnapshot(
            f"durable checkpoint {base}, role {role}: {error}; not used any more (see {part.stem}.corrupt)"
        ) from None
    except OSError as error:
        raise TransportError(f"durable checkpoint {base}, role {role}: {error}") from None


def _part(role: int) -> str:
    return f"role-{role}.json"


def _names(directory: str, world_size: int) -> list[str]:
    found = _list(Path(directory)) if directory else []
    return checkpoint_names.of_size(found, world_size)


def _list(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):  # or deleted since
        return []


def _list_checkpoint(path: Path) -> list[str]:
    """What is in a checkpoint's directory. Another node may delete it meanwhile, as NFS says by ESTALE."""
    try:
        return _list(path)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return []


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[BinaryIO]:
    """A file that is there with all its content, and on the disk, or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with partial.open("wb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())
    partial.rename(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data[:_PIECE]) :]


def _read(file: BinaryIO, into: memoryview, path: Path) -> None:
    while into:
        if not (count := file.readinto(into[:_PIECE])):  # type: ignore[attr-defined]
            raise CorruptSnapshot(f"{path.name} has become shorter")
        into = into[count:]


def _forget_cached(path: Path) -> None:
    """Let what is read next come from storage, as far as the kernel does as it is asked."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _remove(base: Path) -> None:
    """Delete a checkpoint, first what makes it complete, as far as the storage lets us."""
    with contextlib.suppress(OSError):
        for name in _list(base):
            if name != _SEGMENTS:
                (base / name).unlink(missing_ok=True)
        shutil.rmtree(base, ignore_errors=True)
