"""What a node holds in memory: its own roles' snapshots, and replicas for others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from ft_core.errors import CorruptSnapshot, FtError
from ft_core.state.checksums import hash_of, verify
from ft_core.state.manifest import ENVELOPE, CopyTarget, Segment
from ft_core.state.memory import TORN, SharedMemory, SnapshotBuffer, snapshot_memory
from ft_core.state.replicas import ReplicaStore

Found = tuple[Segment, memoryview, Sequence[int]]
LARGEST_ASKED = 8 << 20
"""Bytes of a tensor that goes along in an answer."""


class RoleMemory:
    """The two snapshot buffers of a role. They outlive its worker."""

    def __init__(self, create: Callable[[int], SharedMemory] = snapshot_memory) -> None:
        """`create`: memory of so many bytes."""
        self._create = create
        self.slots: list[SnapshotBuffer | None] = [None, None]

    def allocate(self, slot: int, segments: Sequence[Segment], again: bool = False) -> SnapshotBuffer:
        """Memory for a slot; what the slot held is given up. A worker that is ending may have a device write
        there still: unless that cannot be (`again`), it is memory that nobody has used."""
        if again and (same := self._laid_out(slot, segments)) is not None:
            self.strike(slot)
            return same
        # From here on nobody but the list may have it: it would be freed where that ends.
        given_up, self.slots[slot] = [self.slots[slot]], None
        give_up(given_up)
        buffer = SnapshotBuffer.create(segments, self._create)
        self.slots[slot] = buffer
        return buffer

    def take(self, buffer: SnapshotBuffer) -> int:
        """Have a version that was made elsewhere, in place of what is oldest or torn. Returns its slot."""
        slot = self.free_slot()
        given_up, self.slots[slot] = [self.slots[slot]], buffer
        give_up(given_up)
        return slot

    def _laid_out(self, slot: int, segments: Sequence[Segment]) -> SnapshotBuffer | None:
        """What the slot has, if it is for these segments."""
        held = self.slots[slot]
        return held if held is not None and held.segments == tuple(segments) else None

    def free_slot(self) -> int:
        """The slot whose content is oldest or torn."""
        held = [TORN - 1 if b is None else b.version for b in self.slots]
        return held.index(min(held))

    def versions(self) -> list[int]:
        """Complete versions, oldest first."""
        return sorted(b.version for b in self.slots if b is not None and b.version != TORN)

    def find(self, version: int) -> tuple[int, SnapshotBuffer] | None:
        """The slot that holds `version`, and its buffer."""
        for slot, buffer in enumerate(self.slots):
            if buffer is not None and buffer.version == version:
                return slot, buffer
        return None

    def drop_after(self, version: int) -> None:
        """Strike off versions that the job has rolled back behind."""
        for buffer in self.slots:
            if buffer is not None and buffer.version > version:
                buffer.version = TORN

    def strike(self, slot: int) -> None:
        """Strike off a copy that was found corrupt."""
        buffer = self.slots[slot]
        if buffer is not None:
            buffer.version = TORN

    def segments(self) -> tuple[Segment, ...]:
        """The layout of the newest complete version; empty before there is one."""
        held = self.versions()
        found = self.find(held[-1]) if held else None
        return found[1].segments if found else ()


class NodeStore:
    """Serves transfers: reads come from own snapshots or replicas, writes go to the replicas."""

    def __init__(self) -> None:
        self.replicas = ReplicaStore()
        self.create: Callable[[int], SharedMemory] = snapshot_memory
        """Memory of so many bytes, for a buffer."""
        self.roles: dict[int, RoleMemory] = {}
        self.adopted: dict[int, RoleMemory] = {}
        """What roles that are away alone had, which is not all that one needs who plays them."""
        self._lock = threading.Lock()

    def memory(self, role: int, adopted: bool = False) -> RoleMemory:
        """The role's buffers here; made at first use. `adopted`: those of what another role holds for it."""
        with self._lock:
            return (self.adopted if adopted else self.roles).setdefault(role, RoleMemory(self.create))

    def keep_only(self, roles: Iterable[int], adopted: Iterable[int]) -> None:
        """Give up the memory of roles that live elsewhere now."""
        given_up: list[SnapshotBuffer | None] = []
        with self._lock:
            for held, keep in ((self.roles, set(roles)), (self.adopted, set(adopted))):
                for role in set(held) - keep:
                    memory = held.pop(role)
                    given_up += memory.slots
                    memory.slots = [None, None]
        give_up(given_up)

    def envelope(self, role: int, tensor: str = "") -> tuple[int, bytes, bytes]:
        """The role's newest version here, its envelope, and the bytes of the tensor of that name, if there is
        one and it is not large. Raises FtError if there is no version."""
        with self._lock:
            memory = self.roles.get(role, RoleMemory())  # to ask for it must not make it
        for version in reversed(memory.versions()):
            if (found := memory.find(version)) is None:
                continue
            buffer = found[1]
            wanted = {
                item.name: bytes(buffer.data(index)[item.offset : item.offset + item.nbytes])
                for index, segment in enumerate(buffer.segments)
                for item in segment.items
                if item.name == ENVELOPE or (item.name == tensor and item.nbytes <= LARGEST_ASKED)
            }
            if ENVELOPE in wanted and buffer.version == version:  # and was not written to meanwhile
                return version, wanted[ENVELOPE], wanted.get(tensor, b"")
        raise FtError(f"no version of role {role} is here")

    def buffers(self) -> int:
        """How many there are of the roles here."""
        with self._lock:
            return sum(buffer is not None for held in self.roles.values() for buffer in held.slots)

    def largest_buffer(self) -> int:
        """Bytes of it, of the roles here; 0 without any."""
        with self._lock:
            held = [buffer for memory in self.roles.values() for buffer in memory.slots]
        return max((SnapshotBuffer.size(buffer.segments) for buffer in held if buffer is not None), default=0)

    def _memories(self) -> list[RoleMemory]:
        with self._lock:
            return [*self.roles.values(), *self.adopted.values()]

    def drop_after(self, version: int) -> None:
        """Strike off everything newer than the version the job resumes from."""
        for memory in self._memories():
            memory.drop_after(version)
        self.replicas.drop_after(version)

    # -- SegmentStore --------------------------------------------------------------------------

    def begin(
        self, segment: Segment, version: int, epoch: int, checksums: Sequence[int]
    ) -> CopyTarget | None:
        """Begin to receive a segment, see `transport_server.SegmentStore`."""
        return self.replicas.begin(segment, version, epoch, checksums)

    def commit(self, segment: Segment, version: int) -> None:
        """What was received is whole, see `transport_server.SegmentStore`."""
        self.replicas.commit(segment, version)

    def discard(self, segment: Segment, version: int) -> None:
        """What was received is of no use, see `transport_server.SegmentStore`."""
        self.replicas.discard(segment, version)

    def strike(self, segment_id: str, version: int) -> None:
        """Give up a copy that a reader found corrupt, after making sure that it is."""
        for memory in self._memories():
            found = memory.find(version)
            if found is not None and any(s.id == segment_id for s in found[1].segments):
                try:
                    verify(found[1])
                except CorruptSnapshot:
                    memory.strike(found[0])
        if (replica := self.replicas.find(segment_id, version)) is not None and not _is_sound(*replica):
            self.replicas.strike(segment_id, version)

    def find(self, segment_id: str, version: int) -> Found | None:
        """The segment at that version: from an own role's snapshot if one has it, else a replica."""
        for memory in self._memories():
            found = memory.find(version)
            if found is None:
                continue
            buffer = found[1]
            for index, segment in enumerate(buffer.segments):
                if segment.id == segment_id:
                    return segment, buffer.data(index), list(buffer.checksums(index))
        return self.replicas.find(segment_id, version)


def _is_sound(segment: Segment, data: memoryview, checksums: Sequence[int]) -> bool:
    return all(hash_of(data, index) == checksums[index] for index in range(segment.chunks))


def give_up(memory: list[SnapshotBuffer | None] | list[SnapshotBuffer]) -> None:
    """Drop what is listed, and held by nobody else, in a thread: for many GB the kernel takes seconds, and an
    agent has to beat."""
    if any(memory):
        threading.Thread(target=memory.clear, name="ft-give-up").start()
