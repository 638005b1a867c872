"""Operations that were put off, and the memory whose content does not exist until they are done.

Operations that share memory, directly or by others, are done together and in their order. One is forgotten
as soon as it is done, with the memory that nobody else has. So whoever reads one weight of a model has that
one drawn, and to draw them all takes the memory of one more than the script keeps. One that fails stays, and
so does what follows it.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ft_core.state.owed import OwingGenerator, Position


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
    """Which memory it has; 0 for one that has none of its own."""
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
        """Of each storage the ranges, in their order: between any two something is left out."""

    def add(self, span: Span) -> None:
        """These too."""
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


@dataclass(frozen=True)
class Operation:
    """One that was put off. Its tensors are aliases of the script's, made for it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    written: list[Span]
    draws: Position | None = None
    numbers: int = 0

    def storages(self) -> Iterator[int]:
        """That of each of its tensors."""
        return map(storage_of, tensors_of([*self.args, *self.kwargs.values()]))


class Undone:
    """The operations, in their order."""

    def __init__(self) -> None:
        self._operations: dict[int, Operation] = {}
        self._of: dict[int, list[int]] = {}
        """Storage -> the operations that have it, once for each of their tensors: these keep it alive."""
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._operations)

    def __contains__(self, storage: int) -> bool:
        """Whether its content may not be there, or may be needed as it is now."""
        return storage in self._of

    def put(self, operation: Operation) -> None:
        """Behind all others."""
        self._operations[self._next] = operation
        for storage in operation.storages():
            self._of.setdefault(storage, []).append(self._next)
        self._next += 1

    def clear(self) -> None:
        """Nobody needs any of it."""
        self._operations.clear()
        self._of.clear()

    def written(self) -> Iterator[Span]:
        """What they would write that somebody still has."""
        for operation in self._operations.values():
            yield from (span for span in operation.written if self._lives(span.storage))

    def memory(self) -> Iterator[torch.UntypedStorage]:
        """That they would write, once each, as far as somebody still has it."""
        lives = {span.storage for span in self.written()}
        for operation in self._operations.values():
            for tensor in tensors_of([*operation.args, *operation.kwargs.values()]):
                if (storage := storage_of(tensor)) in lives:
                    lives.discard(storage)
                    yield tensor.untyped_storage()

    def do(self, storages: Iterable[int], generator: OwingGenerator) -> int:
        """All that has to do with these. Returns how many random numbers that were."""
        numbers = 0
        found = sorted(self._connected(storages))
        if not found:
            return 0
        with generator.elsewhere(), torch.inference_mode():
            for which in found:
                operation = self._operations[which]
                if operation.draws is not None:
                    generator.go(operation.draws)
                operation.func(*operation.args, **operation.kwargs)
                numbers += operation.numbers
                self._forget(which)
        return numbers

    def do_all(self, generator: OwingGenerator) -> int:
        """All that somebody can still see. Returns how many random numbers that were."""
        numbers = self.do({span.storage for span in self.written()}, generator)
        self.clear()
        return numbers

    def _connected(self, storages: Iterable[int]) -> set[int]:
        found: set[int] = set()
        known = set(storages)
        ahead = list(known)
        while ahead:
            for which in self._of.get(ahead.pop(), ()):
                if which not in found:
                    found.add(which)
                    more = set(self._operations[which].storages()) - known
                    known |= more
                    ahead += more
        return found

    def _forget(self, which: int) -> None:
        for storage in self._operations.pop(which).storages():
            of = self._of[storage]
            of.remove(which)
            if not of:
                del self._of[storage]

    def _lives(self, storage: int) -> bool:
        return users_of(storage) > len(self._of[storage])


def users_of(storage: int) -> int:
    """How many tensors, and others, have it."""
    return int(torch._C._storage_Use_Count(storage)) - _counted_beside_tensors()


@functools.cache
def _counted_beside_tensors() -> int:
    """By how much more than its tensors a storage's count of uses is, once it was looked at from Python."""
    tensor = torch.empty(1)
    return torch._C._storage_Use_Count(storage_of(tensor)) - 1
