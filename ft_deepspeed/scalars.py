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

    def __init__(self, is_number: Callable[[torch.Tensor], bool]) -> None:
        """`is_number`: whether a tensor is one number, in memory that has nothing else."""
        self._is_number = is_number
        self._done: list[_Done] = []
        self._touched: set[int] = set()

    def before(
        self,
        func: Any,
        written: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
        is_known: Callable[[Any], bool],
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]] | None:
        """An operation is about to be done: what it overwrites, or None where it is not one of these."""
        if not all(map(is_known, read)) and len(self._done) < _MANY and self._repeats(func, written, read):
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
        if len(results) != 1 or not self._is_number(results[0]):
            if before:
                self.clear()
            return
        self._done.append(_Done(func, args, kwargs, read, before, results))
        self._touched.update(map(storage_of, (*read, *results, *(tensor for tensor, _ in before))))

    def follow(self, known: set[int], is_known: Callable[[Any], bool]) -> list[torch.Tensor]:
        """The memory `known` has its content now. Returns what has got its own by that."""
        found: dict[int, torch.Tensor] = {}
        done = list(self._done)
        self.clear()
        if any(storage_of(tensor) in known for each in done for tensor, _ in each.before):
            return []  # the loss itself was changed after others were made of it
        with torch.inference_mode():  # some may have been made in it
            for each in done:
                (result,) = each.results
                at, written = storage_of(result), bool(each.before)
                read = [t for t in each.read if not written or storage_of(t) != at]
                before = each.before[0][1] if written else None
                if not all(storage_of(t) in found or is_known(t) for t in read) or (
                    written and at not in found and before is None
                ):
                    if found.pop(at, None) is not None and result.is_floating_point():
                        result.detach().fill_(math.nan)
                    continue
                if before is not None and at not in found:
                    result.detach().copy_(before)
                args = each.args[:2] if each.func.overloadpacket is torch.ops.aten.copy_ else each.args
                kwargs = {key: value for key, value in each.kwargs.items() if key != "non_blocking"}
                (made,) = tensors_of([each.func(*args, **kwargs)])
                if not written and at not in map(storage_of, each.read):
                    result.detach().copy_(made)
                if not math.isnan(result.item()):
                    found[at] = result
        return list(found.values())

    def clear(self) -> None:
        """Nothing of what was done can be done again."""
        self._done.clear()
        self._touched.clear()

    def _repeats(self, func: Any, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> bool:
        """Whether an operation on numbers comes to the same once more, and does nothing besides."""
        if func.namespace != "aten" or len(written) > 1 or not all(map(self._is_number, (*written, *read))):
            return False
        return torch.Tag.inplace_view not in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
