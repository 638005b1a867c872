"""Which bytes of which storages: where tensors are, and what of them has been written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Span:
    """Bytes of a storage."""

    storage: int
    start: int
    stop: int
    dense: bool
    """Whether the tensor has each of them."""


def span_of(tensor: torch.Tensor) -> Span:
    """Where a tensor is."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    extent = 0
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum(int((length - 1) * step) for length, step in steps)
    return Span(storage_of(tensor), start * size, (start + extent) * size, extent == tensor.numel())


def storage_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor has; 0 for one that has none of its own."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0


def tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among an operation's arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


class Bytes:
    """Which bytes of which storages."""

    def __init__(self) -> None:
        self._starts: dict[int, list[int]] = {}
        self._stops: dict[int, list[int]] = {}
        """Storage -> its ranges, in their order: between any two something is left out."""

    def add(self, span: Span) -> None:
        """Have these among them, too."""
        starts = self._starts.setdefault(span.storage, [])
        stops = self._stops.setdefault(span.storage, [])
        first, last = bisect_left(stops, span.start), bisect_right(starts, span.stop)
        if first < last:  # it touches these
            starts[first:last] = [min(span.start, starts[first])]
            stops[first:last] = [max(span.stop, stops[last - 1])]
        else:
            starts.insert(first, span.start)
            stops.insert(first, span.stop)

    def covers(self, span: Span) -> bool:
        """Whether all of these are among them."""
        if span.start == span.stop:
            return True
        before = bisect_right(self._starts.get(span.storage, ()), span.start)
        return before > 0 and self._stops[span.storage][before - 1] >= span.stop
