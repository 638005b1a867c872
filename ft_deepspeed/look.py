"""What loading a batch may change: random states, what a data set and a collator have, a script's variables.

Two looks are equal where nothing of that has changed. It is cheap, and errs towards a change: what is an
iterator may be read on with each batch, and nobody can tell.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
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


def look(fetcher: Any, index: Any) -> list[Any]:
    """What the batch of `index` is loaded from, and by. Raises Changing where there is no telling."""
    marks = _Marks([at for at in index if type(at) is int][:_FEW] if isinstance(index, (list, tuple)) else [])
    for name in _LOADS:
        marks.of(getattr(fetcher, name, None))
    return marks.found


def look_at_script() -> list[Any]:
    """The script's variables."""
    marks = _Marks([])
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
    def __init__(self, index: Sequence[int]) -> None:
        """`index`: entries of large containers that are looked at besides."""
        self.found: list[Any] = []
        self._index = index
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
            return id(value), value.shape, self._of_array(value)
        if isinstance(value, rng.KINDS):
            state = rng.state_of(value)
            return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
        if isinstance(value, io.IOBase):
            reads = not value.closed and value.readable() and not value.writable() and value.seekable()
            return value.tell() if reads else id(value)  # of what is written it would write
        if isinstance(value, torch.nn.Module) and value._parameters:
            return id(value)
        if isinstance(value, (Iterator, MethodWrapperType)):
            raise Changing(type(value).__name__)
        return None

    def _of_array(self, value: np.ndarray) -> bytes:
        if value.dtype == object or not value.shape or isinstance(value, np.memmap):
            return b""
        row = max(1, value.nbytes // max(1, len(value)))
        rows = [at for at in self._index if -len(value) <= at < len(value)]
        return value[: min(_FEW, _BYTES // row)].tobytes() + value[rows[: _BYTES // row]].tobytes()

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, (list, tuple)):
            kind: Any = list if isinstance(value, list) else tuple
            many = kind.__len__(value)
            yield many
            few = range(many) if many <= 2 * _FEW else (*range(_FEW), *range(many - _FEW, many), *self._index)
            yield from (kind.__getitem__(value, at) for at in few if at < many)
        elif isinstance(value, deque):
            yield from (len(value), *(value[0], value[-1])) if value else (0,)
        elif isinstance(value, (set, frozenset)):
            yield len(value)
            yield sum(hash(part) for part in value) if len(value) <= 2 * _FEW else id(value)
        elif isinstance(value, dict):
            yield dict.__len__(value)
            if dict.__len__(value) <= 2 * _FEW:
                yield from (part for pair in list(dict.items(value)) for part in pair)
            else:
                yield from (dict.get(value, at) for at in self._index)
        elif isinstance(value, FunctionType):
            yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
            yield from (value.__defaults__, value.__kwdefaults__, vars(value))
        elif isinstance(value, (MethodType, BuiltinMethodType)):
            yield value.__self__
            yield from [value.__func__] if isinstance(value, MethodType) else ()
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        else:
            yield from _attributes(value)


def _attributes(value: Any) -> Iterator[Any]:
    """Those that it has itself, in its dictionary or in slots, and numbers and text of its classes."""
    with contextlib.suppress(AttributeError):
        yield from list(object.__getattribute__(value, "__dict__").values())
    for kind in type(value).__mro__[:-1]:
        for name, member in list(vars(kind).items()):
            if isinstance(member, MemberDescriptorType):
                yield getattr(value, name, None)
            elif type(member) in (bool, int, float, str) and not name.startswith("__"):
                yield member


_PLAIN = {bool, int, float, str, list, dict, deque, set, Counter, OrderedDict, defaultdict, *rng.KINDS}
"""Types of variables that a script may change as it loads."""
_EMPTY = CellType()
