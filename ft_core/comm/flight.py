"""Writes the flight record of a worker's process groups, into `flight_memory`.

An operation costs one `pack_into` when it begins, a byte when its issuer goes on or comes to wait for it, and
one word when it ends: no lock, nothing that is kept. The slot of an operation that is under way is not used
again, however many come after it.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import time
from typing import Any

import msgspec
import torch

from ft_core.comm.flight_memory import (
    APART,
    DTYPES,
    EPOCH,
    HEADER,
    RING,
    ROLE,
    SIZE,
    SLOT,
    SLOTS,
    TABLE,
    TABLE_BYTES,
)
from ft_core.protocol.flight import KINDS, UNDER_WAY, FlightGroup
from ft_core.protocol.groups import GroupId

log = logging.getLogger(__name__)

_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}

_OUTPUT, _INPUT, _NOTHING = 0, 1, 2
_WHAT = {
    "allreduce": ("all_reduce", _OUTPUT),
    "broadcast": ("broadcast", _OUTPUT),
    "reduce": ("reduce", _OUTPUT),
    "allgather": ("all_gather", _OUTPUT),
    "reduce_scatter": ("reduce_scatter", _INPUT),
    "alltoall": ("all_to_all", _INPUT),
    "gather": ("gather", _INPUT),
    "scatter": ("scatter", _OUTPUT),
    "barrier": ("barrier", _NOTHING),
    "send": ("send", _OUTPUT),
    "recv": ("recv", _OUTPUT),
}
"""Kind (see `collectives.COLLECTIVES`) -> what a record calls it, and which argument tells its size: one
that is as large on all members, where there is such."""
_KINDS = {kind: (KINDS.index(name), where) for kind, (name, where) in _WHAT.items()}
_recording = torch.is_grad_enabled
_COLLECTIVE = -1
_SLOT_BYTES, _MASK = SLOT.size, (1 << 32) - 1
_ENDED = 5
"""Word of a slot."""
_TRIES = 64
"""Slots in a row that are kept, for operations under way, before one is used again."""


class Group:
    """What is recorded of one process group."""

    def __init__(self, number: int, identity: GroupId, members: tuple[int, ...], backend: str) -> None:
        self.number, self.name, self.members = number, str(identity), members
        self.label, self.backend = "", backend
        self.epoch = -1
        self.counts: dict[int, int] = {}
        """Operations of this epoch: of all members, and by peer and direction."""

    def shown(self) -> FlightGroup:
        """The group as it stands in the table."""
        return FlightGroup(self.number, self.name, self.label, self.backend)


class FlightRecorder:
    """Writes the record of `role`."""

    def __init__(self, role: int, memory: memoryview | None = None) -> None:
        """`memory`: `SIZE` bytes from a page boundary on, that somebody reads."""
        self._memory = memoryview(mmap.mmap(-1, SIZE)) if memory is None else memory[:SIZE]
        self._header = self._memory[:HEADER].cast("q")
        self._ring = self._memory[RING:]
        self._words, self._numbers = self._ring.cast("q"), self._ring.cast("I")
        self._next = itertools.count(1)
        self._group_numbers = itertools.count()
        self._groups: dict[int, Group] = {}
        self.step = -1
        """Steps that the role has finished; -1: it has not begun to train."""
        self._header[EPOCH] = 0
        self._header[ROLE] = role

    def begins(self, epoch: int) -> None:
        """Operations are those of `epoch` from now on, and are counted anew."""
        self._header[EPOCH] = epoch

    # -- groups ------------------------------------------------------------------------------------

    def add(self, identity: GroupId, members: tuple[int, ...], backend: str = "gloo") -> Group:
        """A group is made. One at a time, as all of these."""
        group = Group(next(self._group_numbers), identity, members, backend)
        self._groups[group.number] = group
        self._write_table()
        return group

    def call(self, group: Group, label: str) -> None:
        """The script calls it so."""
        if label != group.label:
            group.label = label
            self._write_table()

    def drop(self, group: Group) -> None:
        """It is destroyed: what it has done is not shown any more."""
        if self._groups.pop(group.number, None) is not None:
            self._write_table()

    def _write_table(self) -> None:
        shown = [group.shown() for group in self._groups.values()]
        room = TABLE_BYTES - 8
        while len(text := msgspec.json.encode(shown)) > room:
            shown = shown[: len(shown) * room // len(text) - 1]
            log.warning("%d groups have no place in the flight record", len(self._groups) - len(shown))
        version = self._header[TABLE] + 1
        start = HEADER + version % 2 * TABLE_BYTES
        self._memory[start : start + 8].cast("q")[0] = len(text)
        self._memory[start + 8 : start + 8 + len(text)] = text
        self._header[TABLE] = version

    # -- operations --------------------------------------------------------------------------------

    def begin(self, group: Group, epoch: int, kind: str, args: tuple[Any, ...]) -> int:
        """An operation is issued. Returns what `end` wants. Any thread; of one group, one at a time."""
        code, where = _KINDS[kind]
        nbytes, dtype = _measure(args[where]) if where < len(args) else (0, 0)
        if epoch != group.epoch:
            group.epoch, group.counts = epoch, {}
        key, peer = _place(group, kind, args)
        counts = group.counts
        counts[key] = number = counts.get(key, -1) + 1
        slot = self._take(epoch)
        index = slot % SLOTS * _SLOT_BYTES
        now = time.monotonic_ns()
        about = epoch, number, nbytes, now, UNDER_WAY, peer, code, dtype, False, _recording(), self.step
        SLOT.pack_into(self._ring, index, slot, group.number, *about, slot)
        return slot

    def _take(self, epoch: int) -> int:
        """The number of a slot that is free."""
        words = self._words
        for _ in range(_TRIES):
            slot = next(self._next) & _MASK
            at = slot % SLOTS * 8
            if words[at + _ENDED] != UNDER_WAY or words[at + 1] != epoch:
                break
        return slot

    def apart(self, slot: int, whether: bool) -> None:
        """Whether the role does something else while it is under way, or waits for it. Any thread."""
        at = slot % SLOTS
        if self._numbers[16 * at] == slot:
            self._ring[at * _SLOT_BYTES + APART] = whether

    def end(self, slot: int) -> None:
        """It has ended, well or badly. Any thread, also the garbage collector; once more does no harm."""
        at = slot % SLOTS
        if self._numbers[16 * at] == slot and self._words[8 * at + _ENDED] == UNDER_WAY:
            self._words[8 * at + _ENDED] = time.monotonic_ns()

    def refused(self, group: Group, kind: str, args: tuple[Any, ...]) -> None:
        """What was begun last is the caller's mistake: no peer counts it."""
        key, _ = _place(group, kind, args)
        group.counts[key] -= 1


def _place(group: Group, kind: str, args: tuple[Any, ...]) -> tuple[int, int]:
    """Under which number it is counted, and the role at the other end."""
    if kind not in ("send", "recv"):
        return _COLLECTIVE, -1
    peer = group.members[args[1]] if len(args) > 2 else -1  # of a receive from any source it is not known
    return 2 * peer + 2 + (kind == "send"), peer


def _measure(value: Any) -> tuple[int, int]:
    """Bytes and type of a tensor, or of all in a list."""
    if isinstance(value, torch.Tensor):
        # As large on all members, which what a sparse tensor takes is not.
        return value.numel() * value.element_size(), _CODES.get(value.dtype, 0)
    nbytes = dtype = 0
    if isinstance(value, list | tuple):
        for each in value:
            more, dtype = _measure(each)
            nbytes += more
    return nbytes, dtype
