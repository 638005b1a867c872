"""Random numbers that are owed: how many words of torch's CPU generator a fill takes, and the generator that
stands where they leave it once somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ft_core.state import mersenne

_PERIOD = 16
"""torch draws normal numbers by so many."""


@dataclass(frozen=True)
class Position:
    """A state of the generator: so many draws after another."""

    origin: torch.Tensor
    draws: int
    taken: int
    """Draws that follow."""


@dataclass
class OwingGenerator:
    """torch's for the CPU. While it owes draws its own state is none that means anything, so that it is seen
    when somebody sets another one."""

    _origin: torch.Tensor | None = None
    _placeholder: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    _owed: int = 0
    _next: Position | None = None

    def owe(self, draws: int) -> Position:
        """Where it stands; from here on it owes so many more."""
        state = torch.default_generator.get_state()
        if self._origin is None or not torch.equal(state, self._placeholder):
            self._origin, self._owed = state, 0
            self._placeholder = mersenne.other(state)
            torch.default_generator.set_state(self._placeholder)
        position = Position(self._origin, self._owed, draws)
        self._owed += draws
        return position

    def settle(self) -> None:
        """Owe nothing."""
        if self._origin is not None:
            origin, self._origin = self._origin, None
            if torch.equal(torch.default_generator.get_state(), self._placeholder):
                torch.default_generator.set_state(mersenne.advanced(origin, self._owed))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, `go` sets it; afterwards it stands where it would."""
        self.settle()
        state = torch.default_generator.get_state()
        self._next = None
        try:
            yield
        finally:
            torch.default_generator.set_state(state)

    def go(self, position: Position) -> None:
        """To a position, unless it is there."""
        follows = self._next
        if follows is None or follows.origin is not position.origin or follows.draws != position.draws:
            torch.default_generator.set_state(mersenne.advanced(position.origin, position.draws))
        self._next = Position(position.origin, position.draws + position.taken, 0)


_untouched = torch.Generator()
_measured: dict[tuple[Any, torch.dtype, int], int | None] = {}


def draws_of(func: Any, args: Sequence[Any], dtype: torch.dtype, numbers: int) -> int | None:
    """How many words of 32 bits it takes to fill a contiguous tensor of so many numbers: tried with few, of
    which each period more takes the same. None if this cannot be said. Raises what filling it would raise."""
    func(torch.empty(0, dtype=dtype), *args[1:], generator=_untouched)
    few = numbers if numbers < 6 * _PERIOD else 4 * _PERIOD + numbers % _PERIOD
    first = _measure(func, args, dtype, few)
    if first is None or few == numbers:
        return first
    second = _measure(func, args, dtype, few + _PERIOD)
    return None if second is None else first + (second - first) * ((numbers - few) // _PERIOD)


def _measure(func: Any, args: Sequence[Any], dtype: torch.dtype, numbers: int) -> int | None:
    key = func, dtype, numbers
    if key not in _measured:
        found = set()
        for kept in (0, 1):  # a generator may have a normal number left, since it draws them in pairs
            generator = torch.Generator()
            generator.manual_seed(0)
            torch.empty(kept).normal_(generator=generator)
            before = generator.get_state()
            func(torch.empty(numbers, dtype=dtype), *args[1:], generator=generator)
            after = generator.get_state()
            draws = mersenne.drawn(after) - mersenne.drawn(before)
            found.add(draws if torch.equal(mersenne.advanced(before, draws), after) else None)
        _measured[key] = found.pop() if len(found) == 1 else None
    return _measured[key]
