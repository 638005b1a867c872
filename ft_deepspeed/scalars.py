"""Numbers that a script makes of its loss before `backward`, such as `total += loss.detach()`.

In a step that is done a newcomer's loss has its value from `backward` on. What was made of it before is made
again then: operations on single numbers since the last call of the engine's, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft_deepspeed.spans import storage_of, tensors_of

_MANY = 1000
"""Operations that are kept between two calls."""


@dataclass(frozen=True)
class _Done:
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    read: Sequence[torch.Tensor]
    before: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    """What it has written, and what was in there; None: that was not known."""
    results: Sequence[torch.Tensor]


class Scalars:
    """Operations on numbers that are yet to be known."""

    def __init__(self) -> None:
        """A script's that has done none."""
        self._done: list[_Done] = []
        self._touched: set[int] = set()

    def before(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], is_known: Callable[[Any], bool]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]] | None:
        """An operation is about to be done: what it overwrites, or None where it is not one of these."""
        touched = [*written, *read]
        if len(self._done) < _MANY and all(t.numel() == 1 for t in touched) and not all(map(is_known, read)):
            return [(t, t.detach().clone() if is_known(t) else None) for t in written]
        if self._touched.intersection(map(storage_of, written)):
            self.clear()
        return None

    def done(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        read: Sequence[torch.Tensor],
        before: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        result: Any,
    ) -> None:
        """It was done."""
        results = list(tensors_of([result]))
        if torch.Tag.nondeterministic_seeded in func.tags or any(t.numel() != 1 for t in results):
            return
        self._done.append(_Done(func, args, kwargs, read, before, results))
        self._touched.update(map(storage_of, (*read, *results, *(tensor for tensor, _ in before))))

    def follow(self, is_known: Callable[[Any], bool]) -> list[torch.Tensor]:
        """More is known now. Returns what has got its content by that."""
        known: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for done in self._done:
                written = {storage_of(tensor): before for tensor, before in done.before}
                read = [t for t in done.read if storage_of(t) not in written]
                if not all(storage_of(t) in known or is_known(t) for t in read):
                    for tensor, _ in done.before:
                        if known.pop(storage_of(tensor), None) is not None and tensor.is_floating_point():
                            tensor.detach().fill_(math.nan)
                    continue
                if any(at not in known and before is None for at, before in written.items()):
                    continue
                for tensor, before in done.before:
                    if storage_of(tensor) not in known and before is not None:
                        tensor.detach().copy_(before)
                made = list(tensors_of([done.func(*done.args, **done.kwargs)]))
                if not written:
                    for result, value in zip(done.results, made, strict=True):
                        if storage_of(result) not in map(storage_of, done.read):
                            result.detach().copy_(value)
                known |= {storage_of(t): t for t in (*done.results, *(tensor for tensor, _ in done.before))}
        self.clear()
        return list(known.values())

    def clear(self) -> None:
        """Nothing of what was done can be done again."""
        self._done.clear()
        self._touched.clear()
