"""Numbers and arrays that a newcomer's script reads of what it does not have: they go along in what is
computed of them, and nothing is decided by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

DECIDES = "its script decides by what is made of the model's larger outputs or its weights"
Refuse = Callable[[str], NoReturn]

_SHAPED_BY_CONTENT = frozenset(
    "allclose argwhere array_equal array_equiv bincount compress digitize extract flatnonzero histogram "
    "intersect1d isin lexsort nonzero setdiff1d union1d unique".split()
)
"""numpy's functions of which not even the shape of what they return is known, or that decide themselves."""


class Unknown:
    """Not a number for all that reads it, but that a loss which is read before `backward` is finite."""

    since: int
    """After how many steps the oldest was read that it is computed of."""
    output = False
    """Whether it is the model's own."""
    _refuse: Refuse

    @property
    def newest(self) -> int:
        """When it was read: a number is not added to."""
        return self.since

    @classmethod
    def made(cls, value: float, since: int, refuse: Refuse) -> Any:
        """`refuse`: called with what the script wants of it that cannot be had."""
        found: Any = cls(value)  # type: ignore[call-arg]
        found.since, found._refuse = since, refuse
        return found

    def _computed(self, *others: Any) -> Any:
        if not all(isinstance(other, (int, float, np.generic)) for other in others):
            return NotImplemented
        since = min([self.since, *(other.since for other in others if isinstance(other, Unknown))])
        numpys = any(isinstance(each, np.generic) for each in (self, *others))
        return (UnknownNumber if numpys else UnknownFloat).made(math.nan, since, self._refuse)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _computed
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _computed
    __lt__ = __le__ = __gt__ = __ge__ = _computed
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _computed

    def __eq__(self, other: object) -> Any:
        return False if other is self else self._computed(other)

    def __ne__(self, other: object) -> Any:
        return True if other is self else self._computed(other)

    __hash__ = object.__hash__

    def __round__(self, digits: Any = None) -> Any:
        return self._computed()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _operation(ufunc, method, inputs, kwargs)

    def _same(self, *args: Any, **kwargs: Any) -> Any:
        return self

    item = tolist = mean = sum = max = min = all = any = round = astype = squeeze = copy = _same

    def _decides(self, *other: Any) -> NoReturn:
        self._refuse(DECIDES)

    __int__ = __index__ = __bool__ = __trunc__ = __floor__ = __ceil__ = is_integer = _decides

    def __repr__(self) -> str:
        return repr(float(self))

    __str__ = __repr__

    def __format__(self, how: str) -> str:
        return format(float(self), how)

    def __reduce__(self) -> Any:
        return float, (float(self),)


class UnknownFloat(Unknown, float):
    """Read of a tensor: of a type that torch makes the same tensors of as of Python's own."""


class UnknownNumber(np.float64, Unknown):  # type: ignore[misc]
    """Read of an array."""


for _name, _value in vars(Unknown).items():  # torch takes no number whose first base is not numpy's
    if callable(_value):
        setattr(UnknownNumber, _name, _value)


def _method(function: Any) -> Any:
    """What numpy would do in C."""
    return lambda self, *args, **kwargs: self._like(function, (_plain(self), *_plain(args)), _plain(kwargs))


class UnknownArray(np.ndarray):
    """An array of what is not known, in which nothing is a number."""

    since: int
    """After how many steps the oldest was read that it is computed of."""
    _refuse: Refuse

    @classmethod
    def made(cls, shape: Sequence[int], since: int, refuse: Refuse) -> UnknownArray:
        """`refuse`: called with what the script wants of it that cannot be had."""
        found = np.full(shape, math.nan).view(cls)
        found.since, found._refuse = since, refuse
        return found

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, UnknownArray):
            self.since, self._refuse = other.since, other._refuse

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _operation(ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func.__name__ in _SHAPED_BY_CONTENT or (func is np.where and len(args) == 1):
            self._refuse(DECIDES)
        return self._like(func, _plain(args), _plain(kwargs))

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What becomes of it by a function, of which the shape is taken."""
        with np.errstate(all="ignore"):
            try:
                found = func(*args, **kwargs)
            except (TypeError, ValueError, IndexError):  # not for what is no number
                self._refuse(DECIDES)
        return self._along(found)

    def _along(self, found: Any) -> Any:
        if isinstance(found, (tuple, list)):
            return type(found)(map(self._along, found)) if type(found) in (tuple, list) else found
        if isinstance(found, np.ndarray):
            return UnknownArray.made(found.shape, self.since, self._refuse)
        if isinstance(found, (np.generic, float)):
            return UnknownNumber.made(math.nan, self.since, self._refuse)
        return found

    def __getitem__(self, index: Any) -> Any:
        if any(isinstance(part, UnknownArray) for part in (index if isinstance(index, tuple) else (index,))):
            self._refuse(DECIDES)
        found = super().__getitem__(index)
        return found if isinstance(found, np.ndarray) else self._along(found)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    @property
    def flat(self) -> Any:
        """The numbers in it."""
        return iter(self.reshape(-1))

    def item(self, *at: Any) -> Any:
        """One number."""
        return self._like(np.ndarray.item, (_plain(self), *at), {})

    def tolist(self) -> Any:
        """Lists of numbers."""
        if self.ndim:
            return [part.tolist() for part in self]
        return UnknownFloat.made(math.nan, self.since, self._refuse)

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        """No other type has anything that is not a number."""
        return self.copy()

    argmax, argmin = _method(np.argmax), _method(np.argmin)
    mean, std, var = _method(np.mean), _method(np.std), _method(np.var)
    dot, trace, take = _method(np.dot), _method(np.trace), _method(np.take)

    def _decides(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(DECIDES)

    __bool__ = __int__ = __index__ = __contains__ = nonzero = searchsorted = compress = _decides

    def __float__(self) -> float:
        return math.nan

    def __repr__(self) -> str:
        return repr(_plain(self))

    def __str__(self) -> str:
        return str(_plain(self))

    def __format__(self, how: str) -> str:
        return format(_plain(self)[()], how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: np.ndarray = _plain(self)
        return plain.__reduce_ex__(protocol)


class Absent:
    """Something that a model has returned of which nothing is known but what it was."""

    _kind: str
    _refuse: Refuse

    def __init__(self, kind: str, refuse: Refuse) -> None:
        """`kind`: the name of its class."""
        self.__dict__.update(_kind=kind, _refuse=refuse)

    def _needed(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(f"its script uses the {self._kind} that the model has returned")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self._needed()
        raise AttributeError(name)  # somebody asks what can be done with it

    __setattr__ = __call__ = __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = _needed
    __int__ = __float__ = __index__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _needed
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _needed
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{self._kind} of a step that is done>"


def _plain(value: Any) -> Any:
    """The same without what refuses."""
    if isinstance(value, UnknownArray):
        return value.view(np.ndarray)
    if isinstance(value, Unknown):
        return math.nan
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return {key: _plain(part) for key, part in value.items()} if type(value) is dict else value


def _operation(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What one of numpy's operations makes of what is not known: its shape."""
    found: Any = next(part for part in (*inputs, *kwargs.get("out", ())) if isinstance(part, _KINDS))
    if ufunc is np.isnan and method == "__call__":
        return np.isnan(*_plain(inputs))
    if method == "at":
        found._refuse(DECIDES)
    shapes = [np.shape(_plain(part)) for part in inputs]
    if method == "reduce":
        how = {key: kwargs[key] for key in ("axis", "keepdims") if key in kwargs}
        shape = np.shape(np.add.reduce(np.zeros(shapes[0]), *inputs[1:2], **how))
    elif method == "outer":
        shape = shapes[0] + shapes[1]
    elif method != "__call__":
        shape = shapes[0]
    elif ufunc.signature is None:
        shape = np.broadcast_shapes(*shapes)
    else:
        shape = np.shape(ufunc(*map(np.zeros, shapes)))
    for into in kwargs.get("out") or ():
        if isinstance(into, np.ndarray) and not isinstance(into, UnknownArray):
            if into.dtype.kind not in "fc":
                found._refuse(DECIDES)
            into[...] = math.nan
    made = [_made(shape, found.since, found._refuse) for _ in range(ufunc.nout)]
    return made[0] if len(made) == 1 else tuple(made)


def _made(shape: Sequence[int], since: int, refuse: Refuse) -> Any:
    if not shape:
        return UnknownNumber.made(math.nan, since, refuse)
    return UnknownArray.made(shape, since, refuse)


_KINDS = (Unknown, UnknownArray)
