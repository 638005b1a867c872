"""A batch that a newcomer's script passes on in a step that is done: loaded once somebody looks at it."""

from __future__ import annotations

import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (type(None), bool, int)


class UnreadBatch:
    """A batch of which only the structure is known, and how to load it."""

    def __init__(self, load: Callable[[], Any], lock: Any = None) -> None:
        """`load`: returns the batch; called once at most, with `lock`."""
        self._lock = lock or threading.RLock()
        self._load: Callable[[], Any] | None = load
        self._leaves: Sequence[torch.Tensor] | None = None
        self._parts: list[weakref.ref[Unread]] = []
        """In the order in which they were made: each is of what was there before."""

    def add(self, part: Unread) -> None:
        """A tensor is of this batch."""
        self._parts.append(weakref.ref(part))

    @property
    def is_read(self) -> bool:
        """Whether it was loaded."""
        return self._leaves is not None

    @property
    def is_used(self) -> bool:
        """Whether anybody has a tensor of it."""
        return any(part() is not None for part in self._parts)

    def read(self) -> Sequence[torch.Tensor]:
        """Load it, and make all that was asked of it meanwhile: whoever looks may also change it."""
        with self._lock:
            if self._leaves is None:
                assert self._load is not None
                self._leaves, self._load = leaves(self._load()), None
                for reference in self._parts:
                    if (part := reference()) is not None:
                        part.ft_value = part.ft_make()
            return self._leaves


class Unread(torch.Tensor):
    """A tensor of an `UnreadBatch`: moved, cast or cut it stays unread, and anything else loads the batch."""

    ft_batch: UnreadBatch
    ft_make: Callable[[], torch.Tensor]
    """What it is, once the batch is loaded."""
    ft_value: torch.Tensor | None
    ft_dtype: torch.dtype

    @staticmethod
    def made(batch: UnreadBatch, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Unread:
        """`dtype`: what it probably is, for those who look past `__torch_function__`."""
        made: Unread = torch.Tensor._make_wrapper_subclass(
            Unread, (0,), dtype=dtype, device=torch.device("cpu")
        )
        made.ft_batch, made.ft_make, made.ft_value, made.ft_dtype = batch, make, None, dtype
        batch.add(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Unread) and first.ft_value is None:
            if func is torch.Tensor.__hash__:
                return id(first)
            if func in _KNOWN:
                return _KNOWN[func]
            others = pytree.tree_leaves((args[1:], kwargs))
            if func in _STAYS and all(isinstance(other, _FIXED) or other is ... for other in others):
                return _later(first, func, args[1:], kwargs)
        args, kwargs = pytree.tree_map(_read, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_read, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


_CASTS = {
    torch.Tensor.long: torch.int64,
    torch.Tensor.int: torch.int32,
    torch.Tensor.bool: torch.bool,
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}
_STAYS = {
    *(
        getattr(torch.Tensor, name)
        for name in "to cuda cpu pin_memory contiguous clone detach __getitem__".split()
    ),
    *_CASTS,
}
_FIXED = (int, str, slice, torch.dtype, torch.device, torch.memory_format, type(None))
"""Arguments that nobody can change until it is made."""
_KNOWN = {
    vars(torch._C.TensorBase)[name].__get__: value
    for name, value in (("requires_grad", False), ("grad_fn", None))
}
"""What is the same of all that are loaded from data."""


def _later(tensor: Unread, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Unread:
    given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype))
    dtype = _CASTS.get(func) or next(given, tensor.ft_dtype)
    return Unread.made(tensor.ft_batch, dtype, lambda: func(_read(tensor), *args, **kwargs))


def _read(value: Any) -> Any:
    if not isinstance(value, Unread):
        return value
    value.ft_batch.read()
    if value.ft_value is None:  # it is being made of another one that is not found yet
        value.ft_value = value.ft_make()
    return value.ft_value


def leaves(data: Any) -> list[Any]:
    """What is in a batch."""
    return pytree.tree_leaves(_within(data))


def _within(data: Any) -> Any:
    return data.data if isinstance(data, UserDict) else data


def _beside(data: Any) -> dict[str, Any]:
    """What a batch has that is none of its tensors."""
    return {k: v for k, v in vars(data).items() if k != "data"} if isinstance(data, UserDict) else {}


class Structure:
    """How the batches of a loader are made up, if all in them is tensors on the host."""

    def __init__(self, data: Any) -> None:
        """`data`: one of its batches."""
        found, self._spec = pytree.tree_flatten(_within(data))
        self._kind, self._beside = type(data), _beside(data)
        self.is_known = bool(found) and all(map(is_plain, found))
        self.is_known &= all(isinstance(value, _PLAIN) for value in self._beside.values())
        self._types = [leaf.dtype for leaf in found] if self.is_known else []

    def fits(self, data: Any) -> bool:
        """Whether another batch is made up the same way."""
        if not self.is_known:
            return True  # it is of no use in any case
        found, spec = pytree.tree_flatten(_within(data))
        alike = type(data) is self._kind and _beside(data) == self._beside and spec == self._spec
        return alike and all(map(is_plain, found))

    def unread(self, batch: UnreadBatch) -> Any:
        """What looks like a batch of this structure, and is loaded once somebody looks at it."""
        found = [Unread.made(batch, dtype, _leaf(batch, at)) for at, dtype in enumerate(self._types)]
        data = pytree.tree_unflatten(found, self._spec)
        if not issubclass(self._kind, UserDict):
            return data
        around = self._kind.__new__(self._kind)
        vars(around).update(self._beside, data=data)
        return around


def _leaf(batch: UnreadBatch, at: int) -> Callable[[], torch.Tensor]:
    return lambda: batch.read()[at]


def is_plain(leaf: Any) -> bool:
    """Whether it is a tensor on the host of which nothing is known but its numbers."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.requires_grad
    )
