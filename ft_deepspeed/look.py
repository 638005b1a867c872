"""What loading a batch may change: random states, what a data set and a collator have, a script's variables.

Two looks are equal where nothing of that has changed. It is cheap, and errs towards a change: what is an
iterator may be read on with each batch, and nobody can tell.
"""

from __future__ import annotations

import functools
import io
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import BuiltinMethodType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch

from ft_core.state import rng
from ft_deepspeed.own_code import scripts
from ft_deepspeed.unread import Unread

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CODE = (type, ModuleType)
_MANY = 2000
"""Objects that are looked at."""
_FEW = 64
"""Entries of a container that are looked at, at either end."""
_BYTES = 4 << 10
_DEEPEST = 6
_LOADS = ("dataset", "collate_fn")
"""What a loader's fetcher reads from, and what makes batches of it."""


class Changing(Exception):  # noqa: N818 - said of a value
    """It may be another one with each look, and nobody can tell."""


def random_states() -> Any:
    """Those of the CPU, which a loader's process has, too."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def same_states(one: Any, other: Any) -> bool:
    """Whether nothing was drawn in between."""
    (python, (_, words, *rest), state), (python_now, (_, words_now, *rest_now), state_now) = one, other
    same = python == python_now and rest == rest_now and np.array_equal(words, words_now)
    return bool(same and torch.equal(state, state_now))


def look(fetcher: Any) -> list[Any]:
    """What there is. Raises Changing where there is no telling."""
    marks = _Marks()
    for name in _LOADS:
        marks.of(getattr(fetcher, name, None))
    for space in _spaces(len(sys.modules)):
        for key, value in space.copy().items():
            if type(value) in _PLAIN and not key.startswith("__"):
                marks.of(value)
    return marks.found


@functools.lru_cache(1)
def _spaces(modules: int) -> list[dict[str, Any]]:
    """The script's modules, which are looked for when there are more or fewer."""
    return [space for _, space in scripts(torch.nn.Module())]


class _Marks:
    def __init__(self) -> None:
        self.found: list[Any] = []
        self._seen: set[int] = set()

    def of(self, value: Any, depth: int = 0) -> None:
        """Add what is to be said of `value`, and of what is in it."""
        if isinstance(value, _SCALARS):
            self.found.append(value if value == value else repr(value))
            return
        if id(value) in self._seen or depth > _DEEPEST or len(self._seen) > _MANY or isinstance(value, _CODE):
            self.found.append(id(value))
            return
        self._seen.add(id(value))
        if (mark := self._whole(value)) is not None:
            self.found.append(mark)
            return
        for part in self._parts(value):
            self.of(part, depth + 1)

    def _whole(self, value: Any) -> Any:
        if isinstance(value, Unread):
            return "unread"
        if isinstance(value, torch.Tensor):
            return id(value), value._version if not value.is_inference() else 0
        if isinstance(value, np.ndarray):
            few = (
                value.reshape(-1)[:_FEW] if value.dtype != object and value.flags.c_contiguous else value[:0]
            )
            return id(value), value.shape, few.tobytes()[:_BYTES]
        if isinstance(value, rng.KINDS):
            state = rng.state_of(value)
            return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
        if isinstance(value, io.IOBase):
            return value.tell() if not value.closed and value.seekable() else id(value)
        if isinstance(value, torch.nn.Module):
            return id(value)
        if isinstance(value, (Iterator, MethodWrapperType)):
            raise Changing(type(value).__name__)
        return None

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, (list, tuple, deque)):
            yield len(value)
            yield from (
                value if len(value) <= 2 * _FEW else (value[at] for at in (*range(_FEW), *range(-_FEW, 0)))
            )
        elif isinstance(value, (set, frozenset)):
            yield len(value)
            yield sum(hash(part) for part in value) if len(value) <= 2 * _FEW else id(value)
        elif isinstance(value, Mapping):
            yield len(value)
            if len(value) <= 2 * _FEW:
                yield from (part for pair in list(value.items()) for part in pair)
        elif isinstance(value, FunctionType):
            yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
        elif isinstance(value, (MethodType, BuiltinMethodType)):
            yield value.__self__
            yield from [value.__func__] if isinstance(value, MethodType) else ()
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        else:
            try:
                space = object.__getattribute__(value, "__dict__")
            except AttributeError:
                return
            yield len(space)
            yield from list(space.values())


_PLAIN = {bool, int, float, str, list, dict, deque, set, Counter, OrderedDict, defaultdict, *rng.KINDS}
"""Types of variables that a script may change as it loads."""
_EMPTY = CellType()
