"""Values of attributes, taken as plain data and put back into the objects that had them.

Others may have such an object as well, as two modules have one dictionary that the first writes and the
second reads. So what is put back goes into it: in the process where it was taken into the very object, in
another one into what the script has made there by the time training begins. What several attributes share
they share afterwards, too.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ft_deepspeed.own_code import is_own_class

Path = tuple[Any, ...]
"""The name of an attribute, and the keys that lead on from there."""

MISSING = object()
FIXED = frozenset({type(None), bool, int, float, str})
_PLAIN = (type(None), bool, int, float, str, np.integer, np.float16, np.float32)
_LARGEST = 1 << 20
"""Bytes of a tensor that is looked after. A larger one is a table: it is made, and not added to."""
_TOGETHER = 64 << 10
"""Bytes of all tensors in a container: each version has them, as text."""
_MANY = 1024
"""Entries of a container."""
_ENTRY = 16
"""Bytes of the room for tensors that each entry takes, so that there are not too many in all."""
_DEEPEST = 6

_CONTAINERS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (OrderedDict, Counter, defaultdict, dict, deque, list, torch.Size, tuple, set, frozenset)
}
"""A container is of the first kind here that it is an instance of."""
_EXACT = {kind: name for name, kind in _CONTAINERS.items()}
_MAPPINGS = ("OrderedDict", "Counter", "defaultdict", "dict")
_UNCHANGING = ("Size", "tuple", "frozenset")
_OBJECT, _TENSOR = "object", "tensor"
_NEVER = (type, enum.Enum, torch.nn.Module, torch.optim.Optimizer, *_CONTAINERS.values())
"""What is no object of plain data, though it may be a dataclass. A model's outputs are containers besides."""
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)}

_KIND, _PARTS, _MORE, _FIELDS, _SAME = "ft/kind", "ft/parts", "ft/more", "ft/fields", "ft/same"
_OWN = "own"
"""The class, or a function that it needs, is the script's own."""
LEFT = {_KIND: "left"}
"""Stands for a value that is not plain any more, as it has grown: it is left alone, whatever it was."""


def is_kept(value: Any) -> bool:
    """Whether it is a tensor that belongs to no pass."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and value.grad_fn is None
        and value.device.type != "meta"
        and value.nbytes <= _LARGEST
    )


def is_plain(value: Any) -> bool:
    """Whether it can be taken: a number, text, a small tensor, or a few of those in whatever containers."""
    return _room(value, 0, _LARGEST if isinstance(value, torch.Tensor) else _TOGETHER) >= 0


def _room(value: Any, depth: int, room: int) -> int:
    """What it leaves of so many bytes for tensors; below 0 if it is not plain."""
    if type(value) in FIXED or isinstance(value, _PLAIN):
        return room
    if isinstance(value, torch.Tensor):
        return room - value.nbytes if is_kept(value) else -1
    if (kind := _kind(value)) is None or depth == _DEEPEST:
        return -1
    parts, fields = _parts(value, kind), _fields(value, kind)
    if max(len(parts), len(fields)) > _MANY:
        return -1
    if kind in _MAPPINGS and not all(_is_key(key) for key, _ in parts):
        return -1
    if (room := room - _ENTRY * (len(parts) + len(fields))) < 0:
        return -1
    for part in [*(part for _, part in parts), *fields.values()]:
        if (room := _room(part, depth + 1, room)) < 0:
            break
    return room


def _is_key(key: Any) -> bool:
    """Whether an envelope can have it."""
    parts = key if type(key) is tuple else (key,)
    return all(type(part) in FIXED or isinstance(part, _PLAIN) for part in parts)


Flat = tuple[tuple[Any, ...], ...]
"""What was in a container, if that was numbers and text alone: nearly all are such, and do not change."""


def flat(value: Any) -> Flat | None:
    """What is in it, for `Look.is_unchanged`."""
    if type(value) is dict:
        content: Flat = (*value,), (*value.values(),)
    elif type(value) is list:
        content = ((*value,),)
    else:
        return None
    return content if all(type(each) in FIXED for part in content for each in part) else None


class Look:
    """All values at one time."""

    def __init__(self, before: Look | None = None) -> None:
        """`before`: the one before, whose copies of tensors that have not changed are taken over."""
        self.objects: dict[Path, Any] = {}
        """The object that was at each path, once."""
        self._paths: dict[int, Path] = {}
        """By its identity: where it was met first."""
        self._others: set[int] = set()
        """Objects that were found not to be plain; many modules have the same one."""
        self._before = before._copies if before is not None else {}
        self._copies: dict[Path, tuple[torch.Tensor, int, Any]] = {}

    def taken(self, value: Any, path: Path) -> Any:
        """What is there as plain data, which nobody changes any more; MISSING where it is not plain."""
        if id(value) in self._others:
            return MISSING
        if id(value) not in self._paths and not is_plain(value):
            self._others.add(id(value))
            return MISSING
        return self._take(value, path)

    def is_unchanged(self, value: Any, content: Flat, path: Path) -> bool:
        """Whether it still has that content, and was met nowhere else: then what was taken of it is right."""
        if id(value) in self._paths or len(value) != len(content[0]):
            return False
        if not all(map(is_, value, content[0])):
            return False
        if len(content) > 1 and not all(map(is_, value.values(), content[1])):
            return False
        self._paths[id(value)], self.objects[path] = path, value
        return True

    def _take(self, value: Any, path: Path) -> Any:
        if type(value) in FIXED:
            return value
        if isinstance(value, np.generic):
            return {_KIND: "number", _PARTS: value.item(), _MORE: value.dtype.str}
        if (kind := _TENSOR if isinstance(value, torch.Tensor) else _kind(value)) is None:
            return value
        if kind not in _UNCHANGING and (first := self._paths.setdefault(id(value), path)) is not path:
            return {_SAME: [*first]}
        self.objects[path] = value
        if kind == _TENSOR:
            return self._tensor(value, path)
        taken = [(key, self._take(part, (*path, key))) for key, part in _parts(value, kind)]
        parts = dict(taken) if kind in _MAPPINGS else [part for _, part in taken]
        if type(value) is dict or type(value) is list:
            return parts
        if type(value) is tuple:
            return tuple(parts)
        fields = _fields(value, kind)
        return {
            _KIND: kind,
            _PARTS: parts,
            _MORE: _more(value, kind),
            _FIELDS: {name: self._take(part, (*path, _FIELDS, name)) for name, part in fields.items()},
        }

    def _tensor(self, value: torch.Tensor, path: Path) -> Any:
        seen, version, taken = self._before.get(path, (None, 0, None))
        inference = value.is_inference()  # nobody counts what is written to it
        if inference or seen is not value or version != value._version:
            copied, device = value.detach().clone(), value.device.type
            taken = copied if device == "cpu" else {_KIND: _TENSOR, _PARTS: copied, _MORE: device}
        if not inference:
            self._copies[path] = value, value._version, taken
        return taken


def is_first(taken: Any) -> bool:
    """Whether that is a container's content, and not where the same container was met first."""
    return isinstance(taken, (dict, list)) and _SAME not in taken


class Giving:
    """Puts back all values of one time."""

    def __init__(self, objects: Mapping[Path, Any], first: Mapping[Path, Any], other: Callable[[Any], Any]):
        """`objects`: what was where they were taken, empty in another process. `first`: what was here when
        training began. `other`: gives what belongs to another attribute, by its name, if it is not there."""
        self._objects, self._first, self._other = objects, first, other
        self._given: dict[Path, Any] = {}
        self._used: set[int] = set()

    def give(self, state: Any, path: Path, here: Any) -> Any:
        """What belongs there. `state`: what `Look.taken` returned; `here`: what is there now, or MISSING.

        Raises LookupError where the script alone could make it.
        """
        if isinstance(state, torch.Tensor):
            return self._give_tensor(state, None, path, here)
        if isinstance(state, (list, tuple)):
            return self._give_container(type(state).__name__, state, None, {}, path, here)
        if not isinstance(state, dict):
            return state
        if _SAME in state:
            first = tuple(state[_SAME])
            if first not in self._given:
                self._other(first[0])
            return self._given[first]
        if _KIND not in state:
            return self._give_container("dict", state, None, {}, path, here)
        kind, parts, more = state[_KIND], state[_PARTS], state[_MORE]
        if kind == "number":
            return np.dtype(more).type(parts)
        if kind == _TENSOR:
            return self._give_tensor(parts, more, path, here)
        return self._give_container(kind, parts, more, state[_FIELDS], path, here)

    def _give_tensor(self, state: torch.Tensor, device: str | None, path: Path, here: Any) -> torch.Tensor:
        like = here if isinstance(here, torch.Tensor) else self._first.get(path)
        if not isinstance(like, torch.Tensor):
            like = None
        found = self._object(path, here, _TENSOR)
        if (
            found is None
            or found.shape != state.shape
            or found.dtype != state.dtype
            or (found.is_inference() and not torch.is_inference_mode_enabled())
        ):
            found = state.to(like.device if like is not None else torch.device(device or "cpu"), copy=True)
        elif not torch.equal(found, state.to(found.device)):
            with torch.no_grad():
                found.copy_(state)
        self._given[path] = found
        return found

    def _give_container(
        self, kind: str, state: Any, more: Any, fields: dict[str, Any], path: Path, here: Any
    ) -> Any:
        like = next((x for x in (here, self._first.get(path)) if _kind(x) == kind), None)
        live = dict(_parts(here, kind)) if _kind(here) == kind else {}
        space = _fields(here, kind) if _kind(here) == kind else {}
        found = self._object(path, here, kind)
        if found is None and kind not in _UNCHANGING:
            found = _made(kind, more, like)
        if kind not in _UNCHANGING:
            self._given[path] = found
        items = list(state.items()) if kind in _MAPPINGS else list(enumerate(state))
        parts = [(key, self.give(part, (*path, key), live.get(key, MISSING))) for key, part in items]
        if kind in _UNCHANGING:
            if found is not None and _alike(_parts(found, kind), parts):
                return found
            return _unchanging(kind, more, [part for _, part in parts], like)
        _fill(found, kind, parts)
        given = {
            name: self.give(part, (*path, _FIELDS, name), space.get(name, MISSING))
            for name, part in fields.items()
        }
        _set_fields(found, kind, given)
        return found

    def _object(self, path: Path, here: Any, kind: str) -> Any:
        """The one that was there, unless something else has it by now; None: there is none."""
        found = self._objects.get(path)
        if found is None and here is self._first.get(path) and not _is_frozen(here):
            found = here
        has = _TENSOR if isinstance(found, torch.Tensor) else _kind(found)
        if has != kind or id(found) in self._used:
            return None
        if kind not in _UNCHANGING:
            self._used.add(id(found))
        return found


def _kind(value: Any) -> str | None:
    kind: Any = type(value)
    if (exact := _EXACT.get(kind)) is not None:
        return exact
    if isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value) or is_own_class(kind):
        return None if isinstance(value, _NEVER) else _OBJECT
    return next((name for name, kind in _CONTAINERS.items() if isinstance(value, kind)), None)


def _is_frozen(value: Any) -> bool:
    """Whether it is a dataclass that is made anew for each change, so that others have the old one."""
    return bool(getattr(getattr(value, "__dataclass_params__", None), "frozen", False))


def _parts(value: Any, kind: str) -> list[tuple[Any, Any]]:
    """What is in it, by key. As the kind has it, whatever a class of the script's own makes of that."""
    if kind == _OBJECT:
        return []
    if kind in _MAPPINGS:
        return list(_CONTAINERS[kind].items(value))
    return list(enumerate(_CONTAINERS[kind].__iter__(value)))


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Its own attributes."""
    space = getattr(value, "__dict__", None)
    if space is value:  # a dictionary whose entries are its attributes
        return {}
    found = dict(space or {})
    if kind == _OBJECT:
        found |= {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return found


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        found = (names,) if isinstance(names, str) else names
        for name in found:
            if name.startswith("__") and not name.endswith("__"):
                yield f"_{base.__name__.lstrip('_')}{name}"
            elif name not in ("__dict__", "__weakref__"):
                yield name


def _set_fields(target: Any, kind: str, fields: dict[str, Any]) -> None:
    before, slots = _fields(target, kind), {*_slots(type(target))}
    for name in before.keys() - fields.keys():
        if name in slots:
            object.__delattr__(target, name)
        else:
            del vars(target)[name]
    for name, value in fields.items():
        if before.get(name, MISSING) is value:
            continue
        if name in slots:
            object.__setattr__(target, name, value)
        else:
            vars(target)[name] = value


def _more(value: Any, kind: str) -> Any:
    """What one has to know to make another."""
    if type(value) is not _CONTAINERS.get(kind):
        return _OWN
    if kind == "deque":
        return value.maxlen
    if kind == "defaultdict":
        factory = value.default_factory
        name = getattr(factory, "__name__", None)
        return name if factory is _FACTORIES.get(name or "") else _OWN
    return None


def _made(kind: str, more: Any, like: Any) -> Any:
    """An object of that kind, to be filled."""
    if like is not None:
        return copy.copy(like)
    if more == _OWN:
        raise LookupError(f"a {kind} of the script's own")
    if kind == "deque":
        return deque(maxlen=more)
    if kind == "defaultdict":
        return defaultdict(_FACTORIES.get(more))
    return _CONTAINERS[kind]()


def _unchanging(kind: str, more: Any, parts: list[Any], like: Any) -> Any:
    if like is None and more == _OWN:
        raise LookupError(f"a {kind} of the script's own")
    of = type(like) if like is not None else _CONTAINERS[kind]
    return getattr(of, "_make", of)(parts)


def _fill(target: Any, kind: str, parts: list[tuple[Any, Any]]) -> None:
    if kind == _OBJECT or _alike(_parts(target, kind), parts):
        return
    of = _CONTAINERS[kind]
    of.clear(target)
    if kind in _MAPPINGS:
        for key, part in parts:
            of.__setitem__(target, key, part)
    elif kind == "set":
        of.update(target, [part for _, part in parts])
    else:
        of.extend(target, [part for _, part in parts])


def _alike(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(k is m and v is w for (k, v), (m, w) in pairs)


def same(one: Any, other: Any) -> bool:
    """Whether two have the same content, as they were taken."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other.to(one.device))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
