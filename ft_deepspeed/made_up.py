"""What a newcomer's script has that is made of what was not there.

In steps that are done the model's larger outputs are answered without content, and its weights are those of
another step. What a script computes or copies from either is nothing that its predecessor had. Most of it
goes nowhere: it is written to a log that was written before. But what is still there later is used.

So while a newcomer passes steps over, and for as long after it as what it made there may be in use, every
operation of its script is seen between the engine's calls. What comes from there carries a mark, by its
memory, with the step; what is overwritten has lost it. Then

- a marked tensor of an earlier step that is there when the script arrives was kept, and is not gone on with:
  what was added to from step to step, or lies in a list, a dictionary or an attribute. So is one that is
  younger, and is there two steps later. What a mere variable has was most likely left there;
- nor is a marked tensor gone on with that the engine, a peer or a file is given, that decides what the script
  does, or that it reads later;
- a number that it reads of one in these steps is `Unknown`, and so is an array: they go along, and nothing is
  decided by them. Where `float` has made a plain number, that is NaN (`floats`).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import math
import os
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ft_deepspeed import floats, patched
from ft_deepspeed.below import Below, Compiler
from ft_deepspeed.module_state import saved_buffers
from ft_deepspeed.own_code import scripts
from ft_deepspeed.scalars import Scalars
from ft_deepspeed.spans import Bytes, Span, span_of, storage_of, tensors_of
from ft_deepspeed.unknown import DECIDES, Absent, Unknown, UnknownArray, UnknownFloat

aten = torch.ops.aten

YOUNG = 2
"""Steps. What a loop has computed in one of the last is overwritten in one of the next."""
_OVERWRITE = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_}
_FINITE = {aten.isnan, aten.isinf, aten.isposinf, aten.isneginf}
"""The predecessor went on, so it had found nothing there."""
_COMPARE = {aten.eq, aten.ne}
_DECIDE = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
_LOOKED_AT = 200_000
"""Objects, at most, among which a name is looked for."""
_DEPTH = 6
_ATOMS = {int, float, bool, str, bytes, type(None)}
_EMPTY = types.CellType()
KEPT = (
    "{} was made of the model's weights or larger outputs, which were not those of that step, and it is "
    "still there (name what has it, keep({}=...), or make it anew before it is used)"
)
_GIVES = "what is made of the model's larger outputs or its weights is given to {}"


class _Mark:
    """What is made up in one storage."""

    def __init__(self, tensor: torch.Tensor, since: int) -> None:
        storage = tensor.untyped_storage()
        self.since = self.newest = since
        """When it was made, and when it was added to last."""
        self.output = False
        """Whether it is an output of the model, as it was answered."""
        self.number = False
        """Whether it was made for one number."""
        self._bytes = storage.nbytes()
        self._alive = StorageWeakRef(storage)
        self._overwritten = Bytes()

    @property
    def alive(self) -> bool:
        return not self._alive.expired()

    def again(self, since: int, now: int) -> None:
        """More of that kind was written into it."""
        self.since, self.newest = min(self.since, since), now
        self._overwritten = Bytes()

    def overwritten(self, tensor: torch.Tensor) -> bool:
        """With what is known. Returns whether all of it is."""
        span = span_of(tensor)
        if span.dense:
            self._overwritten.add(span)
        return self._overwritten.covers(Span(span.storage, 0, self._bytes, True))


class MadeUp:
    """What one newcomer's script has that is made up. Main thread."""

    def __init__(
        self, model: torch.nn.Module, position: Callable[[], int], refuse: Callable[[str], NoReturn]
    ) -> None:
        """`position`: how many steps the script has done. `refuse`: called with what is not gone on with."""
        self._model, self._position, self._refuse = model, position, refuse
        self._marks: dict[int, _Mark] = {}
        self._most = 1000
        """Marks that there may be before those of memory that is gone are dropped."""
        self._scalars = Scalars(self._is_number)
        self._numbers = _Alive()
        """Read of losses, and finite."""
        self._sources: dict[int, StorageWeakRef] = {}
        """Memory of the engine's; by its number, which nothing else has as long as somebody refers to it."""
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """What the script has written of the engine's memory on the way, and what was in there."""
        self._data: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """The memory that weights had, for a script that gives them other."""
        self._kept: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        """What optimizers kept, buffers that are saved, and where they were, for the same reason."""
        self._not_restored: set[int] = set()
        """What of the model's memory no version has: it is as the script writes it."""
        self._arrived: int | None = None
        """Where; None on the way there."""
        self._looked = 0
        """The position at which it was looked last for what is left."""
        self._on = self._between = self._reads = self._rests = False
        self._place = os.getpid(), threading.get_ident()
        self._mode, self._compiler = Below(self._operation), Compiler(self._compiles)
        self._patches = ExitStack()

    # -- where the script is -------------------------------------------------------------------

    def passes(self, state: Iterable[torch.Tensor], optimizers: Iterable[Any] = ()) -> None:
        """It passes steps over. `state`: tensors of the engine's, which are those of another step, as is what
        the `optimizers` keep."""
        tensors = (*state, *self._model.parameters(), *self._model.buffers())
        self._sources = {storage_of(t): StorageWeakRef(t.untyped_storage()) for t in tensors if storage_of(t)}
        modules = self._model.modules()
        hidden = ((m._buffers.get(name) for name in m._non_persistent_buffers_set) for m in modules)
        self._not_restored = {storage_of(t) for found in hidden for t in found if t is not None}
        self._written = {}
        # In stage 3 they come and go by themselves.
        self._data = [(p, p.data) for p in self._model.parameters() if not hasattr(p, "ds_id")]
        self._kept = [(space, name, space[name]) for space, name in saved_buffers(self._model)]
        for optimizer in optimizers:
            kept = optimizer.state
            self._kept.append((vars(optimizer), "state", kept))
            for space in (kept, *kept.values()):
                if isinstance(space, dict):
                    self._kept += ((space, key, value) for key, value in space.items())
        if not self._on:
            self._on = True
            self._replace()
        self._arrived = None

    def returns(self) -> None:
        """A call of the engine's returns to it."""
        if not self._on:
            return
        self._scalars.clear()
        if self._arrived is not None and self._looked != (position := self._position()):
            self._looked = position
            if position == self._arrived + YOUNG:
                self._look(self._arrived)
            if position >= self._arrived + YOUNG and not any(mark.alive for mark in self._marks.values()):
                self._on = False
                self._marks.clear()
                self._patches.close()
                return
        self._between = True
        self._compiler.follow()
        if self._mode not in _get_current_dispatch_mode_stack():
            self._mode.begin()

    def calls(self) -> None:
        """It calls the engine, whose own operations are not meant."""
        if self._on:
            self._between = False
            self._leave()

    def puts_back(self) -> None:
        """Undo what the script has done to the engine's memory in steps that are done: the state that is
        loaded there has it."""
        for storage, before in self._written.values():
            storage.copy_(before)
        for parameter, data in self._data:
            if storage_of(parameter) != storage_of(data):
                parameter.data = data
        for space, key, value in self._kept:
            if space.get(key) is not value:
                space[key] = value
        self._written, self._data, self._kept = {}, [], []

    def rests(self) -> None:
        """A recovery begins, in a call or between two."""
        self.puts_back()
        self._rests = self._rests or self._between
        self.calls()

    def after(self, recovery: Callable[[], None]) -> Callable[[], None]:
        """The same with the recovery's last part, after which the script goes on."""

        def done() -> None:
            recovery()
            if self._rests:
                self._rests = False
                self.returns()

        return done

    def _compiles(self) -> None:
        self._scalars.clear()  # what it writes is not seen
        self._leave()

    def _leave(self) -> None:
        self._mode.end()
        self._compiler.leave()  # nothing of this is there when something is compiled

    def seen(self, action: Callable[[], None]) -> None:
        """Inside a call, what is done to the script's own tensors."""
        self.returns()
        try:
            action()
        finally:
            self.calls()

    def arrives(self) -> None:
        """It is where the engine is."""
        if self._on:
            self._scalars.clear()
            self._arrived = self._looked = self._position()
            self._written, self._data, self._kept = {}, [], []  # what it has written by now is its own
            self._look(self._arrived - YOUNG)

    def answered(self, result: Any) -> None:
        """It is given a result from the record, in which larger tensors have no content."""
        if self._on:
            for tensor in pytree.tree_leaves(result):
                if type(tensor) in (Absent, UnknownArray):
                    vars(tensor)["_refuse"] = self._refuse
                if isinstance(tensor, torch.Tensor) and tensor.numel() != 1:
                    self._mark(tensor, self._position())
                    if (mark := self._marks.get(storage_of(tensor))) is not None:
                        mark.output = True

    def known(self, tensors: Iterable[Any]) -> None:
        """These have got their content."""
        found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        for tensor in found:
            if (mark := self._marks.get(storage_of(tensor))) is not None and not mark.output:
                del self._marks[storage_of(tensor)]
            self._overwritten(tensor)
        if known := {storage_of(tensor) for tensor in found}:
            for tensor in self._scalars.follow(known, self._is_known):
                self._marks.pop(storage_of(tensor), None)

    def _overwritten(self, tensor: torch.Tensor) -> None:
        """What was there is not there any more."""
        if (mark := self._marks.get(storage_of(tensor))) is not None and mark.overwritten(tensor):
            del self._marks[storage_of(tensor)]

    def _is_number(self, tensor: torch.Tensor) -> bool:
        """Whether it has its memory for itself."""
        mark = self._marks.get(storage_of(tensor))
        whole = tensor.untyped_storage().nbytes() == tensor.element_size()
        return tensor.numel() == 1 and (whole or (mark is not None and mark.alive and mark.number))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return self._since(tensor) is None

    def given(self, values: Any, to: str) -> None:
        """Refuse what is marked, now that the script is where others are."""
        if self._on and self._arrived is not None:
            found = map(self._since, pytree.tree_leaves(values))
            if any(since is not None for since in found):
                self._refuse(_GIVES.format(to))

    # -- operations ----------------------------------------------------------------------------

    def _operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._on or self._place != (os.getpid(), threading.get_ident()):
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        written, read = _touched(func, args, kwargs)
        before = None
        if self._arrived is None:
            self._save(written)
            before = self._scalars.before(func, written, read, self._is_known)
        result = func(*args, **kwargs)
        self._follow(func, args, written, read, result)
        if before is not None:
            self._scalars.done(func, args, kwargs, read, before, result)
        return result

    def _save(self, written: Iterable[torch.Tensor]) -> None:
        """Before the engine's memory is written for the first time."""
        for tensor in written:
            at = storage_of(tensor)
            if at in self._sources and at not in self._written and at not in self._not_restored:
                storage = tensor.untyped_storage()
                before = storage.clone() if storage.device.type == "cpu" else storage.cpu()
                self._written[at] = storage, before

    def _follow(
        self,
        func: Any,
        args: Sequence[Any],
        written: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
        result: Any,
    ) -> None:
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):  # of a tensor it is given they need the shape
            return
        if (since := min((s for s in map(self._since, read) if s is not None), default=None)) is not None:
            if packet in _FINITE or (packet in _COMPARE and _is_finite(*args[:2])):
                return
            if packet in _DECIDE and not self._reads:
                self._refuse(DECIDES)
        for tensor in written:
            if since is not None:
                self._mark(tensor, since)
            else:
                self._overwritten(tensor)
        if since is not None and not written:
            there = set(map(storage_of, read))
            for tensor in tensors_of([result]):
                if (at := storage_of(tensor)) not in there:
                    self._mark(tensor, since)
                    if at in self._marks:
                        self._marks[at].number = tensor.numel() == 1

    def _since(self, tensor: Any) -> int | None:
        """Since when it is made up, if it is."""
        if not isinstance(tensor, torch.Tensor) or not (storage := storage_of(tensor)):
            return None
        if storage in self._sources:
            return self._position() if self._arrived is None else None
        mark = self._marks.get(storage)
        return mark.since if mark is not None and mark.alive else None

    def _mark(self, tensor: torch.Tensor, since: int) -> None:
        storage = storage_of(tensor)
        if not storage:
            return
        if storage in self._sources:
            if self._arrived is not None:
                self._refuse(_GIVES.format("the model"))
            return
        mark = self._marks.get(storage)
        if mark is not None and mark.alive:
            mark.again(since, self._position())
            return
        self._marks[storage] = _Mark(tensor, since)
        if len(self._marks) > self._most:
            self._marks = {at: mark for at, mark in self._marks.items() if mark.alive}
            self._most = max(1000, 2 * len(self._marks))

    # -- what reads content without an operation -------------------------------------------------

    def _replace(self) -> None:
        for patch in patched.READS:
            made = getattr(self, f"_{patch.name.strip('_')}")
            self._patches.enter_context(patch.replaced(self._reading(patch.original(), made)))
        own = (space for name, space in scripts(torch.nn.Module()) if not name.startswith(("ft_", "model.")))
        self._patches.enter_context(floats.replaced(own, self._made_float))

    def _read_since(self, tensor: torch.Tensor) -> int | None:
        """Since when what the script is about to read is made up, if it is."""
        since = self._since(tensor) if self._between and not self._reads else None
        if since is None or self._place != (os.getpid(), threading.get_ident()):
            return None
        if self._arrived is not None and since < self._arrived - YOUNG:
            self._refuse(_GIVES.format("what is done now"))
        return since

    def _reading(self, original: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _caller().startswith("ft_") or (since := self._read_since(tensor)) is None:
                return original(tensor, *args, **kwargs)
            self._reads = True
            try:
                return otherwise(original, since, tensor, *args, **kwargs)
            finally:
                self._reads = False

        return read

    def _item(self, original: Any, since: int, tensor: torch.Tensor) -> Any:
        value = original(tensor)
        known = tensor.requires_grad and isinstance(value, float) and math.isfinite(value)
        number = UnknownFloat.made(value if known else math.nan, since, self._refuse)
        if known:
            self._numbers.add(number)
        return number

    def _float(self, original: Any, since: int, tensor: torch.Tensor) -> float:
        return math.nan

    def _made_float(self, value: Any = 0.0, /) -> float:
        """What the script gets that calls `float`."""
        kind = type(value)
        if issubclass(kind, Unknown):
            return value
        if issubclass(kind, UnknownArray) and value.size == 1:
            return value.item()
        known = not issubclass(kind, torch.Tensor) or value.numel() != 1
        if not known and (since := self._read_since(value)) is not None:
            return UnknownFloat.made(math.nan, since, self._refuse)
        return float(value)

    def _bool(self, original: Any, since: int, tensor: torch.Tensor) -> NoReturn:
        self._refuse(DECIDES)

    _int = _index = _bool

    def _array(self, original: Any, since: int, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(torch.full(tensor.shape, math.nan, dtype=torch.float64), *args, **kwargs)

    def _numpy(self, original: Any, since: int, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return UnknownArray.made(tuple(tensor.shape), since, self._refuse)

    def _tolist(self, original: Any, since: int, tensor: torch.Tensor) -> Any:
        return UnknownArray.made(tuple(tensor.shape), since, self._refuse).tolist()

    def _repr(self, original: Any, since: int, tensor: torch.Tensor, **kwargs: Any) -> str:
        return f"tensor(nan, size={tuple(tensor.shape)})"

    def _reduce_ex(self, original: Any, since: int, tensor: torch.Tensor, *args: Any) -> Any:
        if self._arrived is not None:
            self._refuse(_GIVES.format("a file"))
        return original(tensor, *args)

    # -- what is left --------------------------------------------------------------------------

    def _look(self, before: int) -> None:
        """Refuse what was made before a position and was kept."""
        if not self._left(before):
            return
        gc.collect()  # what only itself refers to is not there
        if not (left := self._left(before)):
            return
        for name, value, container in _reachable():
            found = left.get(storage_of(value) if issubclass(type(value), torch.Tensor) else id(value))
            if found is not None and (found.newest > found.since or self._keeps(container, found)):
                self._refuse(KEPT.format(name, re.split(r"[.[]", name)[0]))

    def _keeps(self, container: Any, found: _Mark | Unknown) -> bool:
        """Whether what lies there was put there. An output lies in what the model returns."""
        if container is None or isinstance(container, (types.FunctionType, types.GeneratorType)):
            return False
        return not found.output or type(container) in (list, dict, set, deque) or _is_object(container)

    def _left(self, before: int) -> dict[int, _Mark | Unknown]:
        """By storage, or by its own identity."""
        marks = {at: mark for at, mark in self._marks.items() if mark.alive and mark.since < before}
        return marks | {id(number): number for number in self._numbers if number.since < before}


@functools.cache
def _uses(func: Any) -> dict[str, tuple[bool, bool]]:
    """By an argument's name: whether it is written, and whether it is read."""
    found = {}
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        overwrites = writes and (argument.is_out or func.overloadpacket in _OVERWRITE)
        found[argument.name] = writes, not overwrites
    return found


def _touched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What an operation writes, and what it reads."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    uses = _uses(func)
    ordered = zip(uses.values(), args, strict=False)
    for (writes, reads), value in (*ordered, *((uses[n], v) for n, v in kwargs.items() if n in uses)):
        tensors = list(tensors_of([value]))
        written += tensors if writes else ()
        read += tensors if reads else ()
    return written, read


def _is_finite(one: Any, other: Any) -> bool:
    """Whether a comparison asks for that: the predecessor went on, so it had found that it was."""
    return one is other or (isinstance(other, float) and math.isinf(other))


def _caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))


class _Alive:
    """Numbers that somebody has."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Unknown]] = {}

    def add(self, number: Unknown) -> None:
        """One more."""
        at = id(number)
        self._references[at] = weakref.ref(number, lambda _: self._references.pop(at, None))

    def __iter__(self) -> Iterator[Unknown]:
        return (found for at in list(self._references.values()) if (found := at()) is not None)


def _is_object(container: Any) -> bool:
    """Whether a container is an object of the script's, and no structure that a model returns."""
    return not isinstance(container, (dict, tuple)) and not dataclasses.is_dataclass(container)


def _reachable() -> Iterator[tuple[str, Any, Any]]:
    """What the script has, by name: variables of functions that run and of its modules, and what is in them;
    with what it lies in."""
    rest: deque[tuple[str, Any, Any, int]] = deque((name, value, None, 0) for name, value in _variables())
    seen: set[int] = set()
    while rest and len(seen) < _LOOKED_AT:
        name, value, container, depth = rest.popleft()
        yield name, value, container
        if id(value) not in seen and depth < _DEPTH:
            seen.add(id(value))
            parts = ((more, part) for more, part in _parts(value) if type(part) not in _ATOMS)
            rest.extend((f"{name}{more}", part, value, depth + 1) for more, part in parts)


def _variables() -> Iterator[tuple[str, Any]]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("ft_", "torch", "deepspeed", "importlib", "runpy")):
            yield from _locals(frame).items()
        frame = frame.f_back
    for _, space in scripts(torch.nn.Module()):
        yield from list(space.items())


def _locals(frame: types.FrameType) -> dict[str, Any]:
    """A copy. What Python makes of a function's variables for who asks has them as long as it runs."""
    found, made = dict(frame.f_locals), frame.f_locals
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(made, dict):
        made.clear()
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)  # `isinstance` asks a proxy for its class
    if issubclass(kind, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{at}]", part) for at, part in enumerate(list(value)))
    elif issubclass(kind, types.FunctionType):
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f".{name}", cell.cell_contents) for name, cell in names if cell != _EMPTY)
    elif issubclass(kind, types.GeneratorType):
        if value.gi_frame is not None:
            yield from ((f".{name}", part) for name, part in _locals(value.gi_frame).items())
    elif issubclass(kind, (torch.Tensor, type, types.ModuleType)):
        return
    else:
        try:
            space = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        yield from ((f".{name}", part) for name, part in list(space.items()))
