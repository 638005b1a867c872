"""Copies from a device's memory to a snapshot, through a few pieces of locked memory that are used in turn.

Only from locked memory does a device copy by itself. To lock the snapshots takes seconds, in each start and
each recovery; a few pieces are locked once. While the device fills one, threads move those before it to
where they belong, and make their checksums while they are in a cache. Other copies, the small ones of
training, wait on the link behind a few pieces at most, and not behind the whole state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ft_core.process import stream
from ft_core.state.checksums import hash_of
from ft_core.state.manifest import CHUNK, Segment
from ft_core.state.memory import SnapshotBuffer

log = logging.getLogger(__name__)

PIECE = 16 << 20
"""Bytes of a piece: whole chunks."""
PIECES = 4
"""How many there are, and threads that empty them. One thread moves and hashes some 5 GB/s, a device sends 25
to 50."""


@dataclass
class _Part:
    """What of an item is in a piece."""

    name: str
    first: int
    """Byte of the item."""
    at: int
    """Byte of the segment."""
    nbytes: int


@dataclass
class _Range:
    """Bytes of a segment that go through a piece at once."""

    start: int
    end: int
    parts: list[_Part] = field(default_factory=list)


class DeviceCopies:
    """Copies from one device, for one thread, whose current device it is."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._pieces: list[torch.Tensor] = []
        self._threads = ThreadPoolExecutor(PIECES, "ft-piece")

    def copy(self, buffer: SnapshotBuffer, index: int, bytes_of: Callable[[str], torch.Tensor]) -> None:
        """Copy all items of segment number `index`, and make its checksums. `bytes_of`: an item's, flat."""
        if not self._pieces:
            self._stream, self._pieces = stream.beside(), list(locked(PIECES * PIECE).split(PIECE))
        moves: list[Future[None] | None] = [None] * PIECES
        name, source = "", torch.empty(0)
        for number, each in enumerate(_ranges(buffer.segments[index])):
            slot = number % PIECES
            if (before := moves[slot]) is not None:
                before.result()
            piece = self._pieces[slot]
            with torch.cuda.stream(self._stream):
                for part in each.parts:
                    if part.name != name:  # one that is not contiguous is made so once
                        name, source = part.name, bytes_of(part.name)
                    to = piece[part.at - each.start :][: part.nbytes]
                    to.copy_(source[part.first : part.first + part.nbytes], non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
            moves[slot] = self._threads.submit(_move, piece, copied, each, buffer, index)
        for move in moves:
            if move is not None:
                move.result()


def _move(
    piece: torch.Tensor, copied: torch.cuda.Event, each: _Range, buffer: SnapshotBuffer, index: int
) -> None:
    copied.synchronize()
    data, sums, filled = buffer.data(index), buffer.checksums(index), piece.numpy()
    target = np.frombuffer(data, np.uint8)
    for part in each.parts:
        from_ = part.at - each.start
        np.copyto(target[part.at : part.at + part.nbytes], filled[from_ : from_ + part.nbytes])
    for chunk in range(each.start // CHUNK, -(-each.end // CHUNK)):
        sums[chunk] = hash_of(data, chunk)


def _ranges(segment: Segment) -> Iterator[_Range]:
    """A segment in pieces, in its order. A piece begins where a chunk does."""
    items = iter(segment.items)
    item = next(items, None)
    for start in range(0, segment.nbytes, PIECE):
        found = _Range(start, min(start + PIECE, segment.nbytes))
        while item is not None and item.offset < found.end:
            at = max(item.offset, start)
            end = min(item.offset + item.nbytes, found.end)
            if end > at:
                found.parts.append(_Part(item.name, at - item.offset, at, end - at))
            if item.offset + item.nbytes > found.end:
                break  # the rest is in the next
            item = next(items, None)
        yield found


def locked(nbytes: int) -> torch.Tensor:
    """Memory that a device copies to by itself, where it can be had."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning(
            "%d bytes of memory cannot be page-locked (%s): copies hold the GPU up. Is there enough memory, "
            "and is the limit of locked memory high enough (ulimit -l)?",
            *(nbytes, str(error).partition("\n")[0]),
        )
        return torch.empty(nbytes, dtype=torch.uint8)
