"""What a simulated node holds in memory: contents instead of bytes, in slots as `ft_core.state` has them."""

from __future__ import annotations

from dataclasses import dataclass, field

TORN = -1
Copy = tuple[int, int]
"""Version and content."""


@dataclass
class Slots:
    """Two buffers; the older one is overwritten. None where nothing was allocated yet."""

    held: list[Copy | None] = field(default_factory=lambda: [None, None])

    def versions(self) -> list[int]:
        return sorted(copy[0] for copy in self.held if copy is not None and copy[0] != TORN)

    def free(self) -> int:
        ages = [TORN - 1 if copy is None else copy[0] for copy in self.held]
        return ages.index(min(ages))

    def find(self, version: int) -> int | None:
        return next((i for i, copy in enumerate(self.held) if copy is not None and copy[0] == version), None)

    def drop_after(self, version: int) -> None:
        self.held = [(TORN, 0) if copy is not None and copy[0] > version else copy for copy in self.held]


class SimStore:
    """Of one node. Outlives its workers."""

    def __init__(self) -> None:
        self.roles: dict[int, Slots] = {}
        self.adopted: dict[int, Slots] = {}
        self.replicas: dict[str, Slots] = {}
        self.holders: dict[str, tuple[int, ...]] = {}
        """Of the segments of which replicas are here."""
        self.layouts: dict[int, tuple[str, ...]] = {}
        """Segments of the roles whose snapshots are here."""
        self.epoch = 0

    @property
    def holds_something(self) -> bool:
        return any(map(bool, (self.roles, self.adopted, self.replicas)))

    def memory(self, role: int, adopted: bool = False) -> Slots:
        return (self.adopted if adopted else self.roles).setdefault(role, Slots())

    def allocate(self, role: int, slot: int, adopted: bool = False) -> None:
        self.memory(role, adopted).held[slot] = (TORN, 0)

    def write(self, memory: Slots, slot: int, version: int, content: int) -> None:
        """A snapshot is whole, unless its memory has been given up meanwhile."""
        if memory.held[slot] is not None:
            memory.held[slot] = (version, content)

    def read(self, role: int, slot: int, adopted: bool) -> Copy | None:
        copy = self.memory(role, adopted).held[slot]
        return None if copy is None or copy[0] == TORN else copy

    def find(self, role: int, version: int, adopted: bool = False) -> int | None:
        """What is held of a role at that version."""
        memory = self.memory(role, adopted)
        if (slot := memory.find(version)) is None:
            return None
        copy = memory.held[slot]
        assert copy is not None
        return copy[1]

    def content(self, segment: str, version: int, owners: dict[str, list[int]]) -> int | None:
        """Of a segment at that version, from a snapshot or a replica here. `owners`: roles by segment."""
        for role in owners.get(segment, ()):
            for memory in (self.roles.get(role), self.adopted.get(role)):
                if memory is not None and (slot := memory.find(version)) is not None:
                    copy = memory.held[slot]
                    assert copy is not None
                    return copy[1]
        replica = self.replicas.get(segment)
        if replica is not None and (slot := replica.find(version)) is not None:
            copy = replica.held[slot]
            assert copy is not None
            return copy[1]
        return None

    def drop_after(self, version: int) -> None:
        for slots in [*self.roles.values(), *self.adopted.values(), *self.replicas.values()]:
            slots.drop_after(version)

    def keep_only(self, roles: frozenset[int], adopted: frozenset[int]) -> None:
        for held, keep in ((self.roles, roles), (self.adopted, adopted)):
            for role in set(held) - keep:
                held.pop(role).held[:] = [None, None]

    # -- pushed by others --------------------------------------------------------------------------

    def push_begins(self, segment: str, holders: tuple[int, ...], copy: Copy) -> int | None:
        """Returns the slot, which is torn until the push ends; None if an equal copy is here."""
        slots = self.replicas.setdefault(segment, Slots())
        self.holders[segment] = holders
        if copy in slots.held:
            return None
        at = slots.free()
        slots.held[at] = (TORN, 0)
        return at

    def push_ends(self, segment: str, slot: int, copy: Copy) -> None:
        held = self.replicas[segment].held
        for at, other in enumerate(held):
            if other is not None and other[0] == copy[0]:
                held[at] = (TORN, 0)
        held[slot] = copy
