"""Worker side of snapshots: device to host into ping-pong buffers, behind the next forward pass, and back.

DeadPool, sections V-B and VI-A: two host buffers change roles every step, so a failure during a copy
never costs the older one. FFTrainer, section 4.2: what leaves the host later is the unique part only;
the copy here is complete, because a survivor may have to roll back on its own.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from ft_core.adapter import Maker, State, StateTensor
from ft_core.errors import ConfigError, CorruptSnapshot, FtError
from ft_core.process import stream
from ft_core.process.timeline import timeline
from ft_core.state import envelope
from ft_core.state.checksums import verify
from ft_core.state.device_copy import DeviceCopies
from ft_core.state.manifest import CHUNK, ENVELOPE, Segment, layout
from ft_core.state.memory import TORN, SharedMemory, SnapshotBuffer

log = logging.getLogger(__name__)

_PIECE = 256 << 10
"""Bytes that are copied, and then hashed, at once."""
Allocate = Callable[[int, list[Segment]], Sequence[int]]
"""(slot, segments) -> address of fresh memory for that slot, owned by the agent."""


@dataclass(frozen=True)
class _Live:
    """The version that the framework's state is, and of it what may change before the next optimizer step."""

    version: int
    envelope: bytes
    volatile: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Fence:
    device: torch.device | None
    """None: a stand-in's."""
    event: stream.Event


_Row = tuple[str, torch.dtype, torch.Size, tuple[int, ...], bool]
"""What a tensor's place depends on: name, dtype, shape, holders, and whether it is compared with theirs."""
_Place = tuple[str, str, tuple[int, ...], int]
_OWN = ("ft/", "kept.")
"""What the names begin with of what holders may have otherwise, though any of it serves: the envelope, and
what scripts keep."""


class Snapshotter:
    """Stages a role's state version by version, in a thread of its own."""

    def __init__(
        self,
        state: State,
        allocate: Allocate,
        on_staged: Callable[[int], None],
        on_copy: Callable[[], None] = lambda: None,
        epoch_is_over: Callable[[], bool] = lambda: False,
        maker: Maker | None = None,
        verify: bool = False,
    ) -> None:
        """`epoch_is_over`: of the epoch that the state was made in. `maker`: of the state. `verify`: have
        checksums of what holders have alike, to the bit."""
        self._verify = verify
        self.sums: dict[str, str] = {}
        """By segment, that of the newest version that is whole; of segments of which there is one."""
        self._maker = maker
        self._epoch_is_over = epoch_is_over
        self._state = state
        self._allocate = allocate
        self._on_staged = on_staged
        self._on_copy = on_copy
        self._buffers: list[MappedBuffer | None] = [None, None]
        self._unsure: set[int] = set()
        """Slots in which the agent may have other memory by now: it has brought versions from elsewhere."""
        self._thread = ThreadPoolExecutor(1, "ft-d2h")
        self._staging: Future[None] | None = None
        self._live: _Live | None = None
        self._noted: list[StateTensor] = []
        """What `stage` copies of the live version."""
        self._room = 0
        """Bytes that the envelope has in the layout."""
        self._rows: list[_Row] = []
        self._layout: list[Segment] = []
        self._alike: list[int] = []
        """By segment, the first chunk of what all its holders have to the bit; all behind it is so."""
        self._copies = DeviceCopies()

    def note(self, version: int) -> None:
        """The state is version `version`: note what of it may change before the next optimizer step, which is
        the volatile tensors and the envelope. A version need not be staged."""
        data = envelope.encode(envelope.sign(self._state.envelope(), self._maker), self._room)
        self._room = len(data)
        small = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensors = [StateTensor(ENVELOPE, small, self._state.envelope_holders()), *self._state.tensors()]
        tensors = [replace(t, tensor=t.tensor.detach().clone()) if t.volatile else t for t in tensors]
        self._live = _Live(version, data, {t.name: t.tensor for t in tensors if t.volatile})
        self._noted = tensors

    def stage(self, version: int) -> None:
        """Begin to copy the state as version `version`; it must not change until `wait` or the commit.

        What `note` notes is as it was then, if it was called. State on a GPU is what the current stream makes
        of it, and what other streams do that the current one waits for.
        """
        self.wait()
        if not self._noted or self._live is None or self._live.version != version:
            self.note(version)
        tensors, self._noted = self._noted, []
        with torch._C.DisableTorchFunction():  # what the script has for functions is not for these
            device, segments = _device_of(tensors), self._segments(tensors)
        buffer = self._buffer_for(segments)
        known = buffer.version != TORN
        buffer.version = TORN
        # The copies of volatile tensors need no `record_stream`: the thread holds them until all is copied.
        fence = _fence(device)
        self._staging = self._thread.submit(self._copy, buffer, tensors, version, fence, known)

    def wait(self) -> None:
        """Until what was begun is complete in host memory. Raises what the copy raised."""
        if self._staging is not None:
            staging, self._staging = self._staging, None
            staging.result()

    @property
    def under_way(self) -> bool:
        """Whether the copy that was begun last has yet to end."""
        return self._staging is not None and not self._staging.done()

    def ended(self) -> None:
        """Return once it has, well or not: `wait` tells how."""
        if self._staging is not None:
            futures.wait([self._staging])

    @property
    def failed(self) -> BaseException | None:
        """What stopped the copy under way, if anything did."""
        if self._staging is not None and self._staging.done():
            return self._staging.exception()
        return None

    def load(self, slot: int, address: Sequence[int], segments: Sequence[Segment], version: int) -> None:
        """Put version `version`, held in the agent's buffer `slot`, back into the framework.

        Every chunk is verified first; raises CorruptSnapshot without having touched anything. Where the
        framework still has that version, and the agent its own copy of it, only what an abandoned step may
        have changed is put back. Raises ConfigError where another adapter has made that version, and FtError
        where the framework goes on with more than it had.
        """
        buffer = self._buffers[slot]
        own = buffer is not None and buffer.memory_address == list(address)
        self._unsure = {1 - slot}
        if own and self._live is not None and self._live.version == version:
            live = {t.name: t.tensor.detach() for t in self._state.tensors()}
            self._state.restore(live | self._live.volatile, self._opened(self._live.envelope, version))
            return
        if buffer is None or not own:
            buffer = self._map(slot, address, segments)
        if buffer.version != version:
            raise CorruptSnapshot(f"snapshot buffer {slot} holds version {buffer.version}, not {version}")
        nbytes = sum(segment.nbytes for segment in buffer.segments)
        timeline.facts["state"] = timeline.facts.get("state", 0) + nbytes
        timeline.mark("verifying")
        verify(buffer)
        timeline.mark("loading")
        views: dict[str, torch.Tensor] = {}
        for index, segment in enumerate(buffer.segments):
            flat = _as_tensor(buffer.data(index))
            for item in segment.items:
                raw = flat[item.offset : item.offset + item.nbytes]
                views[item.name] = raw.view(getattr(torch, item.dtype)).view(item.shape)
        data = views.pop(ENVELOPE).numpy().tobytes()
        self._live, self._room = None, max(self._room, len(data))
        self._state.restore(views, self._opened(data, version))
        now = list(self._state.tensors())
        if own and (left := sorted(t.name for t in now if t.name not in views)):
            raise FtError(
                f"after `restore` of version {version} the state has {len(left)} tensors that came after it, "
                f"{left[0]} for one: the adapter's `restore` must drop what it is not given"
            )
        volatile = {t.name: t.tensor.detach().clone() for t in now if t.volatile}
        self._live = _Live(version, data, volatile)

    def _opened(self, data: bytes, version: int) -> Any:
        return envelope.checked(envelope.decode(data), self._maker, version)

    def step_begins(self) -> None:
        """From here on the framework's state is no version's, until the next is noted or one is loaded."""
        self._live, self._noted = None, []

    def _segments(self, tensors: Sequence[StateTensor]) -> list[Segment]:
        """Those of the step before, unless it had other tensors."""
        rows = [(*_row(t), self._verify and is_compared(t)) for t in tensors]
        if rows != self._rows:
            self._rows = rows
            self._layout, self._alike = _laid_out(rows)
        return self._layout

    def _buffer_for(self, segments: list[Segment]) -> MappedBuffer:
        sure = [None if slot in self._unsure else buffer for slot, buffer in enumerate(self._buffers)]
        held = [TORN - 1 if b is None else b.version for b in sure]
        slot = held.index(min(held))
        if (there := sure[slot]) is not None and _laid_out_as(there, segments):
            return there
        address, buffer = self._allocate(slot, segments), self._buffers[slot]
        self._unsure.discard(slot)
        if buffer is not None and buffer.memory_address == list(address) and _laid_out_as(buffer, segments):
            return buffer  # it is what it was
        return self._map(slot, address, segments)

    def _likely_the_same(self, buffer: SnapshotBuffer) -> list[list[int]]:
        """By segment, chunks of `buffer` in which nothing changed from its version to the one after it."""
        other = next((b for b in self._buffers if b is not buffer), None)
        if other is None or other.signatures != buffer.signatures:
            return [[]] * len(buffer.segments)
        sums = (np.array((buffer.checksums(i), other.checksums(i))) for i in range(len(buffer.segments)))
        return [np.flatnonzero(here == there).tolist() for here, there in sums]

    def _map(self, slot: int, address: Sequence[int], segments: Sequence[Segment]) -> MappedBuffer:
        buffer = self._buffers[slot] = MappedBuffer(address, segments)
        return buffer

    def _copy(
        self,
        buffer: SnapshotBuffer,
        tensors: list[StateTensor],
        version: int,
        fence: _Fence | None,
        known: bool,
    ) -> None:
        """`known`: the buffer has what its checksums say."""
        self._on_copy()
        if fence is not None and not self._passed(fence):
            self._live = None
            return
        by_name = {t.name: t.tensor for t in tensors}
        on_host = fence is None or fence.device is None
        likely = self._likely_the_same(buffer) if known and on_host else [[]] * len(buffer.segments)
        with torch.no_grad():
            for index in range(len(buffer.segments)):
                if on_host:
                    _copy_from_host(buffer, index, by_name, likely[index])
                else:
                    self._copies.copy(buffer, index, lambda name: _bytes_of(by_name[name]))
        # Of the checksums that were just made: it reads 8 bytes for each MiB.
        self.sums = {
            segment.id: xxhash.xxh3_64_hexdigest(buffer.checksums(index)[first:])
            for index, (segment, first) in enumerate(zip(buffer.segments, self._alike, strict=True))
            if first < segment.chunks and self._verify
        }
        buffer.version = version
        self._on_staged(version)

    def _passed(self, fence: _Fence) -> bool:
        """Wait until the state is made. False if the epoch ended before: what an aborted NCCL exchange leaves
        is garbage, of which neither the host nor the device is told."""
        if fence.device is not None:
            torch.cuda.set_device(fence.device)  # of this thread: else its streams are the first GPU's
        fence.event.synchronize()
        return not self._epoch_is_over()


class MappedBuffer(SnapshotBuffer):
    """A snapshot buffer in another process's memory (the agent's)."""

    def __init__(self, address: Sequence[int], segments: Sequence[Segment]) -> None:
        super().__init__(SharedMemory.open(address), segments)
        self.memory_address = list(address)


def _device_of(tensors: Iterable[StateTensor]) -> torch.device | None:
    """The GPU that state is on; None for state on the host. Raises ConfigError for more than one."""
    found = {t.tensor.device: t.name for t in tensors if t.tensor.is_cuda}
    if len(found) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise ConfigError(f"the state of a role must be on one GPU, and this one's is on more: {where}")
    return next(iter(found), None)


def _laid_out_as(buffer: MappedBuffer, segments: Sequence[Segment]) -> bool:
    return buffer.signatures == [segment.signature for segment in segments]


def _as_tensor(data: memoryview) -> torch.Tensor:
    """The bytes as a tensor, which torch does not make of none."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def _fence(device: torch.device | None) -> _Fence | None:
    """Where the device is once all is done that makes the state; None: state on the host is made."""
    if stream.stand_in is not None:
        return _Fence(None, stream.event())
    if device is None:
        return None
    with torch.cuda.device(device):
        return _Fence(device, stream.event())


def _copy_from_host(
    buffer: SnapshotBuffer, index: int, by_name: dict[str, torch.Tensor], likely: Sequence[int]
) -> None:
    """Piece by piece, so that each is hashed while it is in the nearest cache. By numpy: torch takes some
    microseconds more for each piece, and there are many small tensors.

    Chunks that are `likely` what they were, such as those of frozen weights, are hashed where they come from,
    and not copied if they are."""
    segment = buffer.segments[index]
    same = {chunk for chunk in likely if _is_the_same(buffer, index, chunk, by_name)}
    sums = _Checksums(buffer.data(index), buffer.checksums(index), same)
    target = np.frombuffer(buffer.data(index), np.uint8)
    for item in segment.items:
        source = _bytes_of(by_name[item.name]).numpy()
        for start in range(0, item.nbytes, _PIECE):
            piece = source[start : start + _PIECE]
            at = item.offset + start
            if not {at // CHUNK, (at + len(piece) - 1) // CHUNK} <= same:
                np.copyto(target[at : at + len(piece)], piece)
            sums.reach(at + len(piece))
    sums.reach(segment.nbytes)


def _is_the_same(buffer: SnapshotBuffer, index: int, chunk: int, by_name: dict[str, torch.Tensor]) -> bool:
    """Whether a chunk of the buffer is what would be copied there."""
    data, items = buffer.data(index), buffer.segments[index].items
    at, end = chunk * CHUNK, min((chunk + 1) * CHUNK, len(data))
    state = xxhash.xxh3_64()
    first = bisect.bisect_right(items, at, key=lambda item: item.offset) - 1
    for item in items[first:]:
        if item.offset >= end:
            break
        stop = min(item.offset + item.nbytes, end)
        if stop <= at:
            continue
        begin = max(item.offset, at)
        state.update(data[at:begin])  # a gap
        source = _bytes_of(by_name[item.name]).numpy().data
        state.update(source[begin - item.offset : stop - item.offset])
        at = stop
    state.update(data[at:end])
    return bool(state.intdigest() == buffer.checksums(index)[chunk])


class _Checksums:
    """Makes those of all chunks, as far as what they are of is there."""

    def __init__(self, data: memoryview, sums: memoryview, same: Collection[int]) -> None:
        """`same`: chunks that are in place with their checksums."""
        self._data, self._sums, self._same = data, sums, same
        self._at, self._state = 0, xxhash.xxh3_64()

    def reach(self, end: int) -> None:
        """Up to there everything is in place, gaps between items included."""
        while self._at < end:
            stop = min(end, self._at - self._at % CHUNK + CHUNK)
            if self._at // CHUNK in self._same:
                self._at = stop
                continue
            self._state.update(self._data[self._at : stop])
            if stop % CHUNK == 0 or stop == len(self._data):
                self._sums[self._at // CHUNK] = self._state.intdigest()
                self._state.reset()
            self._at = stop


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.view(-1).view(torch.uint8)


def _row(state: StateTensor) -> tuple[str, torch.dtype, torch.Size, tuple[int, ...]]:
    return state.name, state.tensor.dtype, state.tensor.shape, state.holders


def is_compared(state: StateTensor) -> bool:
    """Weights and moments that others hold too. What each of them may have otherwise, such as random states,
    running statistics, or what a script keeps, is not."""
    number = state.tensor.is_floating_point() or state.tensor.is_complex()
    return number and len(state.holders) > 1 and not state.volatile and not state.name.startswith(_OWN)


def _laid_out(rows: list[_Row]) -> tuple[list[Segment], list[int]]:
    """Segments, and of each the first chunk of what is compared: that comes last, in chunks of its own."""
    groups: dict[tuple[int, ...], tuple[list[_Place], list[_Place]]] = {}
    for name, dtype, shape, holders, compared in rows:
        about = (name, str(dtype).removeprefix("torch."), tuple(shape), shape.numel() * dtype.itemsize)
        groups.setdefault(holders, ([], []))[compared].append(about)
    segments, first = [], []
    for holders in sorted(groups):
        own, alike = groups[holders]
        segments.append(segment := layout(holders, [*own, *alike], apart=len(own)))
        first.append(segment.items[len(own)].offset // CHUNK if alike else segment.chunks)
    return segments, first
