"""What a script's own objects have in them: counts, lists, running means, in attributes and variables.

A newcomer that goes on where its peers are, without the steps before, must have them as its predecessor had.
Plain data is carried. What changes in a step and is something else is named, and then steps are passed over.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch

from ft_core import kept
from ft_core.state import rng
from ft_deepspeed.own_code import scripts

_LARGEST = 64 << 10
"""Bytes of a tensor or array that is carried."""
_MANY = 4096
"""Entries of a container that is looked into."""
_IN_ALL = 20_000
"""Values that are carried, in all."""
_FEW = 512
"""The same, where they are objects."""
_DEEPEST = 6
_SAMPLED = 8
"""Values of a large tensor that are looked at, for whoever writes to it unseen."""
_TAG = "ft"
_SCALARS = (type(None), bool, int, float, str, bytes)
_FIXED = frozenset(_SCALARS)
_KEPT_ELSEWHERE = (
    "torch.",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "tokenizers",
    "peft",
    "trl",
    "tqdm",
    "logging",
    "tensorboard",
    "wandb",
    "mlflow",
    "comet_ml",
    "neptune",
    "clearml",
    "swanlab",
    "trackio",
    "ft_core",
    "ft_deepspeed",
)
"""How modules are named whose objects are known to keep nothing that a loop goes by, or are restored."""

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)

Space = tuple[str, MutableMapping[str, Any], bool]
"""A name, what is looked for there, and whether all its numbers are carried; else what has changed since."""


class Opaque(Exception):  # noqa: N818 - said of a value
    """It is no plain data."""


class ScriptState:
    """The state of the spaces that it is given: where a script's objects and variables are."""

    def __init__(self, spaces: Iterable[Space], model: torch.nn.Module, known: Iterable[Any] = ()) -> None:
        """`model`: what is restored in any case. `known`: what is looked after apart."""
        self._spaces = list(spaces)
        self._known = {id(part) for part in known}
        self._trained = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._own = {name for name, _ in scripts(torch.nn.Module())} | {"__main__"}
        self._objects: dict[int, tuple[Any, Any]] = {}
        """That there were at first, so that a newcomer has them, too: each with its mark."""
        self._bare: set[int] = set()
        """Modules in which there is nothing but what is trained."""
        self._is_large = sum(len(space) for _, space, _ in self._spaces) > _IN_ALL
        if self._is_large:
            return
        self._looks = True
        self._first = {place: self._mark(value) for place, _, _, value, _ in self._places()}
        self._looks = False

    def capture(self) -> dict[str, Any]:
        """What is other than it was at first. Raises Opaque, with the name of what cannot be carried."""
        if self._is_large:
            raise Opaque(f"a script with more than {_IN_ALL:,} variables")
        found: dict[str, Any] = {}
        room = _IN_ALL
        for place, _, _, value, whole in self._places():
            mark = self._mark(value)
            same = mark is None or mark == self._first.get(place, _ABSENT)
            if same and not (whole and type(value) in _FIXED):
                continue
            try:
                found[place] = self._taken(value)
            except Opaque:
                raise Opaque(place) from None
            if (room := room - _size(found[place])) < 0:
                raise Opaque(f"{place}, which has grown large,")
        return found

    def marks(self) -> list[Any]:
        """Equal while nothing has changed."""
        return [] if self._is_large else [self._mark(value) for _, _, _, value, _ in self._places()]

    def restore(self, found: dict[str, Any]) -> None:
        """Put it where it belongs."""
        spaces = {name: space for name, space, _ in self._spaces}
        for place, state in found.items():
            name, _, key = place.rpartition("/")
            if (space := spaces.get(name)) is not None:
                space[key] = self._given(state, space.get(key))

    def _places(self) -> Iterator[tuple[str, MutableMapping[str, Any], str, Any, bool]]:
        for name, space, whole in self._spaces:
            for key, value in list(space.items()):
                if not key.startswith("__"):
                    yield f"{name}/{key}", space, key, value, whole

    def _is_own(self, value: Any) -> bool:
        return type(value).__module__ in self._own and hasattr(value, "__dict__")

    # -- to see whether something has changed ----------------------------------------------------

    def _mark(self, value: Any, depth: int = 0) -> Any:
        """Equal while nothing has changed. None: of what is not looked at."""
        kind = type(value)
        if kind in _FIXED:
            return kind, value
        mark = self._mark_of_object(value, kind, depth)
        if self._looks:
            self._objects[id(value)] = value, mark
        return mark

    def _mark_of_object(self, value: Any, kind: type, depth: int) -> Any:
        if kept.has(value) or id(value) in self._known:
            return None
        if isinstance(value, torch.Tensor):
            return None if id(value) in self._trained else _mark_of_tensor(value)
        if isinstance(value, np.ndarray):
            flat = value.reshape(-1)
            few = flat[:: max(1, flat.size // _SAMPLED)] if value.dtype != object else flat[:0]
            return value.shape, (value if value.nbytes <= _LARGEST else few).tobytes()
        if isinstance(value, np.generic):
            return kind, value.item()
        if isinstance(value, rng.KINDS):
            state = rng.state_of(value)
            return kind, state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
        if isinstance(value, torch.nn.Module):
            if id(value) in self._bare:
                return []
            tensors = [t for t in [*value.parameters(), *value.buffers()] if id(t) not in self._trained]
            if self._looks and not tensors:
                self._bare.add(id(value))
            return list(map(_mark_of_tensor, tensors[:_MANY]))
        if isinstance(value, (list, tuple, deque, dict, set, frozenset)):
            if len(value) <= _MANY and not isinstance(value, dict) and _FIXED.issuperset(map(type, value)):
                return kind, frozenset(value) if isinstance(value, (set, frozenset)) else tuple(value)
            if len(value) > _FEW or depth > _DEEPEST:
                ends = [id(value[0]), id(value[-1])] if isinstance(value, (list, tuple, deque)) else []
                return kind, len(value), ends
            if isinstance(value, dict):
                parts = [(key if type(key) in _FIXED else id(key), part) for key, part in value.items()]
                return kind, [(key, self._mark(part, depth + 1)) for key, part in parts]
            if isinstance(value, (set, frozenset)):
                return kind, sorted(map(repr, value))
            return kind, [self._mark(part, depth + 1) for part in value]
        if isinstance(value, _CODE):
            return None
        if kind.__module__.startswith(_KEPT_ELSEWHERE) or depth > _DEEPEST:
            return None
        if not hasattr(value, "__dict__"):
            return None
        own = self._is_own(value)
        return kind.__name__, [
            (key, self._mark(part, depth + (1 if own else _DEEPEST)))
            for key, part in list(vars(value).items())[:_MANY]
            if own or isinstance(part, (*_SCALARS, torch.Tensor))
        ]

    # -- as plain data ---------------------------------------------------------------------------

    def _taken(self, value: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise Opaque
        if isinstance(value, _SCALARS):
            return value
        if kept.has(value) or id(value) in self._known:
            return {_TAG: "kept", "v": []}
        if isinstance(value, rng.KINDS):
            return {_TAG: "generator", "v": rng.state_of(value)}
        if isinstance(value, np.generic):
            return {_TAG: "number", "v": np.asarray(value)}
        if isinstance(value, torch.Tensor) and value.nbytes <= _LARGEST:
            if value.grad_fn is None and not isinstance(value, torch.nn.Parameter):
                return value.detach().clone()
        elif isinstance(value, np.ndarray) and value.nbytes <= _LARGEST and value.dtype != object:
            return value.copy()
        elif isinstance(value, dict) and len(value) <= _MANY:
            pairs = [[self._taken(key, depth + 1), self._taken(p, depth + 1)] for key, p in value.items()]
            return {_TAG: "dict", "v": pairs}
        elif isinstance(value, (list, tuple, deque, set, frozenset)) and len(value) <= _MANY:
            name = next(name for name, kind in _KINDS.items() if isinstance(value, kind))
            return {_TAG: name, "v": [self._taken(part, depth + 1) for part in value]}
        there, mark = self._objects.get(id(value), (None, None))
        if there is value and self._is_own(value) and not isinstance(value, torch.nn.Module):
            return {_TAG: "object", "v": [[k, self._taken(p, depth + 1)] for k, p in vars(value).items()]}
        if there is value and self._mark(value, depth) == mark:
            return {_TAG: "kept", "v": []}
        raise Opaque

    def _given(self, state: Any, here: Any) -> Any:
        """What `state` says. `here`: what is there, which is changed and returned where it can be."""
        if isinstance(state, torch.Tensor):
            if isinstance(here, torch.Tensor) and here.shape == state.shape and here.dtype == state.dtype:
                with torch.no_grad():
                    here.copy_(state)
                return here
            return state.to(here.device, copy=True) if isinstance(here, torch.Tensor) else state.clone()
        if not isinstance(state, dict):
            return state
        kind, values = state[_TAG], state["v"]
        if kind == "kept":
            return here
        if kind == "number":
            return values[()]
        if kind == "generator":
            rng.set_state(here, values)
            return here
        if kind == "object":
            for key, part in values:
                vars(here)[key] = self._given(part, vars(here).get(key))
            return here
        if kind == "dict":
            into = here if isinstance(here, dict) else {}
            before = dict(into)
            into.clear()
            make: Callable[[], Any] = getattr(into, "default_factory", None) or (lambda: None)
            for key, part in values:
                key = self._given(key, None)
                into[key] = self._given(part, before[key] if key in before else make())
            return into
        there = list(here) if isinstance(here, (list, tuple, deque)) else []
        parts = [self._given(part, there[at] if at < len(there) else None) for at, part in enumerate(values)]
        if kind == "list":
            if isinstance(here, list):
                here[:] = parts
                return here
            return parts
        if kind == "tuple":
            named = isinstance(here, tuple) and hasattr(here, "_fields")
            return type(here)(*parts) if named else tuple(parts)
        if isinstance(here, (deque, set)):
            here.clear()
            here.extend(parts) if isinstance(here, deque) else here.update(parts)
            return here
        return {"deque": deque, "set": set, "frozenset": frozenset}[kind](parts)


_ABSENT = object()
_KINDS: dict[str, type] = {"list": list, "tuple": tuple, "deque": deque, "set": set, "frozenset": frozenset}


def _mark_of_tensor(value: torch.Tensor) -> Any:
    if value.device.type == "meta" or value.is_inference():
        return tuple(value.shape)
    flat = value.detach().reshape(-1)
    sampled = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].float().tolist() if flat.numel() else []
    return tuple(value.shape), value._version, repr(sampled)


def _size(state: Any) -> int:
    if isinstance(state, (torch.Tensor, np.ndarray)):
        return max(1, state.nbytes // 8)
    if isinstance(state, (str, bytes)):
        return 1 + len(state) // 8
    if isinstance(state, dict):
        return {"generator": 700, "number": 1}.get(state[_TAG]) or 1 + sum(map(_size, state["v"]))
    return 1 + sum(map(_size, state)) if isinstance(state, list) else 1


class _Cells(MutableMapping[str, Any]):
    """Variables of functions that inner functions use, too."""

    def __init__(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = dict(cells)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # nothing is assigned yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        for name, cell in self._cells.items():
            try:
                cell.cell_contents  # noqa: B018
            except ValueError:
                continue
            yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def variables(objects: Iterable[tuple[str, Any]]) -> Iterator[Space]:
    """The script's: of its modules, of its functions that are being called, and of those that methods and
    functions among `objects` share with the functions that they were defined in."""
    modules = dict(scripts(torch.nn.Module()))
    for name, space in modules.items():
        yield name, space, False
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules} - {None}
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename in files and frame.f_code.co_name != "<module>":
            # A variable itself can be set by nobody else meanwhile, but for what `_Cells` has.
            yield f"{frame.f_code.co_name}()", dict(frame.f_locals), False
        frame = frame.f_back
    for name, value in objects:
        for at, function in enumerate(_functions(value, set(modules))):
            if function.__closure__:
                yield f"{name}.{function.__qualname__}[{at}]", _Cells(function), False


def _functions(value: Any, modules: set[str]) -> Iterator[types.FunctionType]:
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield value
        return
    for kind in type(value).__mro__:
        if kind.__module__ in modules:
            yield from (part for part in vars(kind).values() if isinstance(part, types.FunctionType))
