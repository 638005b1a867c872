"""What a role's state consists of: items (tensors) in segments (tensors with the same holders).

A segment is the unit of replication and transfer. Its layout depends on its items alone, so every
holder lays it out alike and a copy made for one holder serves any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ft_core.protocol.groups import roles_in, runs_of, segment_id, text_of
from ft_core.protocol.messages import Item, Layout

CHUNK = 1 << 20
"""Bytes per checksummed chunk; the last chunk of a segment may be shorter."""

ENVELOPE = "ft/envelope"
"""The name of the item that has all of a state that is no tensor."""

ALIGN = 64
"""Every item starts at a multiple of this many bytes, so that a view has its dtype's alignment."""


@dataclass(frozen=True)
class Segment:
    """Items that exactly `holders` have with identical content after every step, laid out contiguously."""

    holders: tuple[int, ...]
    items: tuple[Item, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the segment, alignment gaps between items included."""
        return self.items[-1].offset + self.items[-1].nbytes if self.items else 0

    @property
    def chunks(self) -> int:
        """How many checksums the segment has."""
        return -(-self.nbytes // CHUNK)

    @cached_property
    def id(self) -> str:
        """Names the segment over its whole life: who holds it, not what shape it has (that may grow)."""
        return segment_id(self.holders)

    @cached_property
    def held_by(self) -> str:
        """The holders as messages have them."""
        return text_of(runs_of(self.holders))

    @cached_property
    def signature(self) -> str:
        """Equal signatures mean equal layouts: a copy of one is usable as the other."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    @classmethod
    def of(cls, layout: Layout) -> Segment:
        """The segment of a layout that came in a message."""
        return cls(tuple(role for run in roles_in(layout.holders) for role in run), layout.items)

    @property
    def layout(self) -> Layout:
        """The same as messages have it."""
        return Layout(self.held_by, self.items)

    def to_json(self) -> dict[str, Any]:
        """The same as files have it."""
        rows = [[i.name, i.dtype, list(i.shape), i.offset, i.nbytes] for i in self.items]
        return {"holders": list(self.holders), "items": rows}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Segment:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on anything else."""
        items = tuple(
            Item(str(n), str(d), tuple(map(int, s)), int(o), int(b)) for n, d, s, o, b in data["items"]
        )
        return cls(tuple(map(int, data["holders"])), items)


class CopyTarget(NamedTuple):
    """Where a copy comes."""

    data: memoryview
    """Writable, of the segment's size."""
    checksums: Sequence[int]
    """The checksums of the chunks in it, an older copy of the same layout; none where that is not known."""


def layout(
    holders: tuple[int, ...], tensors: Iterable[tuple[str, str, tuple[int, ...], int]], apart: int = 0
) -> Segment:
    """Lay tensors, given as (name, dtype, shape, nbytes), out one after the other. The first `apart` of them
    share no chunk with the others."""
    items, offset = [], 0
    for number, (name, dtype, shape, nbytes) in enumerate(tensors):
        if number == apart:
            offset = -(-offset // CHUNK) * CHUNK
        items.append(Item(name, dtype, shape, offset, nbytes))
        offset = -(-(offset + nbytes) // ALIGN) * ALIGN
    return Segment(holders, tuple(items))
