"""Holds the copies of segments that other nodes' agents pushed here.

Two slots per segment, A and B: a push overwrites the older or invalid one, so that a torn push never harms
the newest good copy (GEMINI and Checkfreq keep two copies for the same reason). A slot is valid only between
`commit` and the next `begin` that takes it.

Readers and writers: `find` gives out a view of the slot's memory and marks that memory as lent, for good. A
`begin` that wants the slot leaves lent memory to its readers and allocates anew; the old memory goes when its
last view does. So a reader needs neither lock nor copy and never sees a byte change, and as reads happen only
in recoveries, the steady state reuses its memory.
"""

from __future__ import annotations

import enum
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ft_core.errors import TransportError
from ft_core.state.manifest import CopyTarget, Segment
from ft_core.state.memory import anonymous


class _State(enum.Enum):
    EMPTY = enum.auto()
    WRITING = enum.auto()
    VALID = enum.auto()


@dataclass
class _Slot:
    state: _State = _State.EMPTY
    memory: mmap.mmap | None = None
    lent: bool = False
    segment: Segment | None = None
    version: int = -1
    epoch: int = -1
    checksums: tuple[int, ...] = ()

    def view(self, nbytes: int) -> memoryview:
        """Writable memory of `nbytes`, the old memory if it is large enough and nobody reads it."""
        if self.memory is None or self.lent or len(self.memory) < nbytes:
            self.memory = None  # first free what was there
            self.memory = anonymous(nbytes)
            self.lent = False
        return memoryview(self.memory)[:nbytes]

    def clear(self) -> None:
        if self.state is _State.WRITING:
            self.memory = None  # the writer may not have stopped yet
        self.state, self.version = _State.EMPTY, -1


class ReplicaStore:
    """A `transport_server.SegmentStore` in this agent's memory. Thread-safe.

    `epoch` is set by the agent when a new epoch begins: pushes begun in an older one are refused from then
    on, also at their commit. Set it before `drop_after`. `every`: steps from a protected version to the next,
    or more.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch, self.every = epoch, 1
        self._lock = threading.Lock()
        self._slots: dict[str, tuple[_Slot, _Slot]] = {}

    def begin(
        self, segment: Segment, version: int, epoch: int, checksums: Sequence[int]
    ) -> CopyTarget | None:
        """Room for a copy, or None if an equal one (version, layout, checksums) is here and valid.

        Raises TransportError: stale epoch, another push of the segment in progress, no memory.
        """
        with self._lock:
            if epoch < self.epoch:
                raise TransportError(
                    f"stale sender: segment {segment.id} version {version} comes from epoch {epoch}, this "
                    f"agent is in epoch {self.epoch}"
                )
            slots = self._slots.setdefault(segment.id, (_Slot(), _Slot()))
            for slot in slots:
                if slot.state is _State.WRITING:
                    raise TransportError(
                        f"a push of segment {segment.id} version {slot.version} is in progress"
                    )
            wanted = (version, segment.signature, tuple(checksums))
            for slot in _valid(slots):
                if slot.segment and (slot.version, slot.segment.signature, slot.checksums) == wanted:
                    return None
            slot = min(slots, key=lambda slot: slot.version if slot.state is _State.VALID else -1)
            before = slot.memory if slot.state is _State.VALID else None
            same = slot.segment is not None and slot.segment.signature == wanted[1]
            slot.state = _State.EMPTY
            try:
                view = slot.view(segment.nbytes)
            except (OSError, ValueError, OverflowError) as error:
                raise TransportError(
                    f"no memory for a replica of segment {segment.id}, {segment.nbytes} bytes: {error}"
                ) from error
            there = slot.checksums if same and slot.memory is before else ()
            slot.state = _State.WRITING
            slot.segment, slot.version, slot.epoch, slot.checksums = segment, version, epoch, wanted[2]
            return CopyTarget(view, there)

    def commit(self, segment: Segment, version: int) -> None:
        """Make the copy valid. Raises TransportError if it was dropped, or its epoch ended, meanwhile."""
        with self._lock:
            slots = self._slots.get(segment.id, ())
            for slot in slots:
                if slot.state is _State.WRITING and slot.version == version:
                    if slot.epoch < self.epoch:
                        slot.state = _State.EMPTY
                        raise TransportError(
                            f"segment {segment.id} version {version} of epoch {slot.epoch} came too late: "
                            f"this agent is in epoch {self.epoch}"
                        )
                    for other in slots:
                        if other is not slot and other.version == version:
                            other.clear()
                    slot.state = _State.VALID
                    self._drop_useless(version)
                    return
            raise TransportError(f"segment {segment.id} version {version} was dropped while it came in")

    def discard(self, segment: Segment, version: int) -> None:
        """Forget an unfinished copy; its memory is used again."""
        with self._lock:
            for slot in self._slots.get(segment.id, ()):
                if slot.state is _State.WRITING and slot.version == version:
                    slot.state = _State.EMPTY

    def find(self, segment_id: str, version: int) -> tuple[Segment, memoryview, Sequence[int]] | None:
        """A valid copy: layout, read-only bytes that stay as they are, checksums."""
        with self._lock:
            for slot in _valid(self._slots.get(segment_id, ())):
                if slot.version == version and slot.segment and slot.memory is not None:
                    slot.lent = True
                    view = memoryview(slot.memory)[: slot.segment.nbytes].toreadonly()
                    return slot.segment, view, slot.checksums
        return None

    def versions(self) -> dict[str, list[int]]:
        """Segment id -> its valid versions, ascending. Segments without any are left out."""
        with self._lock:
            held = {
                name: sorted(slot.version for slot in _valid(slots)) for name, slots in self._slots.items()
            }
        return {name: versions for name, versions in held.items() if versions}

    def segment(self, segment_id: str) -> Segment | None:
        """The layout of the newest valid copy."""
        with self._lock:
            newest = max(_valid(self._slots.get(segment_id, ())), key=lambda slot: slot.version, default=None)
            return newest.segment if newest else None

    def drop_after(self, version: int) -> None:
        """Roll back: no copy newer than `version` is valid, nor becomes so if it is coming in now. Those that
        the epoch itself has brought stay: others may have begun it, and done a step, before this node."""
        with self._lock:
            for slots in self._slots.values():
                for slot in slots:
                    if slot.version > version and slot.epoch < self.epoch:
                        slot.clear()

    def strike(self, segment_id: str, version: int) -> None:
        """Give up one copy: a reader found it corrupt."""
        with self._lock:
            for slot in self._slots.get(segment_id, ()):
                if slot.state is _State.VALID and slot.version == version:
                    slot.clear()

    def _drop_useless(self, version: int) -> None:
        """Give the memory of segments back that are replicated elsewhere by now, since places have changed.

        Who sends `version` has passed the barrier of its step: no role needs one older than the version
        before it any more. One more is left for a copy that turns out to be corrupt.
        """
        for name, slots in list(self._slots.items()):
            if all(
                slot.version < version - 2 * self.every and slot.state is not _State.WRITING for slot in slots
            ):
                del self._slots[name]


def _valid(slots: Sequence[_Slot]) -> list[_Slot]:
    return [slot for slot in slots if slot.state is _State.VALID]
