"""Initialisation that is put off, because a restore is to overwrite it: a newcomer's.

Almost all that a newcomer's start-up does with a big model is to draw weights, which the restore then
overwrites. `Deferred` sees every operation of the main thread before torch does it. What fills a tensor with
random numbers is not done but queued, and so is what only moves such content on or scales it. The content of
these tensors does not exist. So

- an operation that needs it has the whole queue done first, as it would have been, and sees what it would
  have seen. That is so for all operations but those that are known to need nothing;
- the random generator stands where the queued draws leave it whenever somebody asks: they are counted, and
  it is brought there at once (see `owed`);
- what a restore overwrites is seen, byte by byte. If it leaves anything of the queue that somebody still has,
  the queue is done, and the state is restored again.

Nothing is assumed of the script, of a framework or of what an adapter restores. What is not seen: who reads
weights in another thread or by their address, and who asks `torch.default_generator` itself for its state.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ft_core.patched import GENERATOR_READERS, TENSOR_READERS, TENSOR_TEXT
from ft_core.process.timeline import timeline
from ft_core.state import mersenne
from ft_core.state.owed import OwingGenerator, Position, draws_of

log = logging.getLogger(__name__)
aten = torch.ops.aten

_FILLS = {aten.normal_.default, aten.uniform_.default}
_SCALES = {aten.mul_, aten.add_, aten.sub_, aten.div_, aten.clamp_, aten.erfinv_, aten.fill_, aten.zero_}
"""In place, of one tensor and numbers."""
_NEED_NOTHING = {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default, aten.detach.default, aten._unsafe_view.default,
}  # fmt: skip
"""Beside views: what asks a tensor for its shape and type alone."""
_OVERWRITE = {aten.fill_, aten.zero_, aten.copy_}
_INNER = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SMALL = 1 << 20
"""Bytes of real content that are kept for the queue."""


DEFERRED = "FT_DEFERRED_INIT"
"""Of `ftrun`'s environment: 1 has newcomers put off their initialisation. See docs/design.md for what is not
covered yet."""


class Deferred(TorchDispatchMode):
    """Active from `begin` to `end`. Main thread."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[_Queued] = []
        self._held: dict[int, int] = {}
        """Storages whose content does not exist -> how many tensors of the queue keep them alive."""
        self._exposed: dict[int, StorageWeakRef] = {}
        """Storages that can be read past every operation, since numpy, say, has their memory."""
        self._generator = OwingGenerator()
        self._restored: _Bytes | None = None
        """While something is restored: what of it is."""
        self._incomplete = ""
        """What showed that a restore does not overwrite everything."""
        self._on = self._text_unread = False
        self._patches = ExitStack()
        self.skipped = 0
        """Numbers that were not drawn, in all."""
        self.done = 0
        """Of these, numbers that were drawn after all."""

    # -- from the start of the script to its first restore ---------------------------------------

    def begin(self) -> None:
        """From here on nothing is initialised that need not be."""
        if not mersenne.is_state(torch.default_generator.get_state()):
            log.warning(
                "torch %s has another generator than is known here: newcomers draw weights that the "
                "restore overwrites",
                torch.__version__,
            )
            return
        self._on = True
        for patch in TENSOR_READERS:
            self._patches.enter_context(patch.replaced(self._reading(patch.original(), patch.name)))
        for patch in GENERATOR_READERS:
            self._patches.enter_context(patch.replaced(self._asking(patch.original())))
        self._patches.enter_context(TENSOR_TEXT.replaced(self._writing(TENSOR_TEXT.original())))
        self.__enter__()

    @contextmanager
    def text_unread(self) -> Iterator[None]:
        """For a framework that writes tensors out and throws the text away: their content is left out."""
        self._text_unread = True
        try:
            yield
        finally:
            self._text_unread = False

    def end(self, why: str = "", level: int = logging.WARNING) -> None:
        """There is nothing to be put off any more; `why`: nothing overwrites what was, so it is done."""
        if not self._on:
            return
        if why:
            self.complete(why, level)
        self._generator.settle()
        self._on = False
        timeline.facts |= {"skipped": self.skipped - self.done, "drawn": self.done}
        self._queue.clear()
        self._held.clear()
        self._exposed.clear()
        self._patches.close()
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        else:
            log.warning("a dispatch mode of the script's is active: its operations stay slower by some us")

    def restoring(self, restore: Callable[[], None]) -> bool:
        """Run `restore`, which overwrites what was put off, and end this.

        Returns whether it has left anything of that: then all was done, and it is to be restored again.
        """
        if not self._on:
            restore()
            return False
        self._restored, self._incomplete = _Bytes(), ""
        try:
            restore()
            left = self._incomplete or self._left(self._restored)
        finally:
            self._restored = None
        self.end(left)
        return bool(left)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """During a restore: these follow from it, and are made before anybody reads them."""
        if self._restored is not None:
            for tensor in tensors:
                self._restored.add(_span(tensor))

    def complete(self, why: str, level: int = logging.WARNING) -> None:
        """Do all that was put off, and say why: the first time at that level."""
        queue, self._queue = self._queue, []
        self._held.clear()
        if not queue:
            return
        numbers = sum(each.numbers for each in queue)
        self.done += numbers
        log.log(
            logging.DEBUG if self.done > numbers else level,
            "initialisation that was left to the restore is done after all, %d numbers for a start: %s (%s)",
            *(numbers, why, _caller()),
        )
        self._on = False
        try:
            with self._generator.elsewhere(), torch.no_grad():
                for each in queue:
                    if each.draws is not None:
                        self._generator.go(each.draws)
                    each.func(*each.args, **each.kwargs)
        finally:
            self._on = True

    # -- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._on:
            return func(*args, **kwargs)
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        if not isinstance(func, torch._ops.OpOverload) or any(type(t) not in _PLAIN for t in tensors):
            # What it consists of is not seen here.
            self._needed(f"{func} may need it")
            self._generator.settle()
            return func(*args, **kwargs)
        if func in _FILLS and self._restored is None and (made := self._fill(func, args, kwargs)) is not None:
            return made
        missing = [t for t in tensors if _storage(t) in self._held] if self._held else []
        if missing:
            if self._restored is not None:
                return self._while_restoring(func, tensors, missing, args, kwargs)
            if func.is_view or func in _NEED_NOTHING:
                return func(*args, **kwargs)
            deferred = self._defer(func, tensors, args, kwargs)
            if deferred is not _NOT:
                return deferred
            self._needed(f"{func} needs it")
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prim", "c10d"):
            self._generator.settle()
        return func(*args, **kwargs)

    def _needed(self, why: str) -> None:
        if self._restored is None:
            self.complete(why)
        elif self._held:
            self._incomplete = self._incomplete or f"while the state was restored, {why}"

    def _fill(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        tensor: torch.Tensor = args[0]
        generator = kwargs.get("generator")
        if (
            tensor.device.type != "cpu"
            or not tensor.is_contiguous()
            or self._may_be_read(tensor)
            or (generator is not None and generator is not torch.default_generator)
        ):
            return None
        draws = draws_of(func, args, tensor.dtype, tensor.numel())
        if draws is None:
            return None
        position = self._generator.owe(draws)
        alias = self._hold(tensor)
        self._queue.append(_Queued(func, (alias, *args[1:]), {}, [_span(alias)], position, tensor.numel()))
        self.skipped += tensor.numel()
        return tensor

    def _defer(
        self, func: Any, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The operation's result, or _NOT if it cannot be put off."""
        packet = func.overloadpacket
        made: Any
        if func is aten.copy_.default or func is aten._foreach_copy_.default:
            changed = args[0] if isinstance(args[0], list) else [args[0]]
            if any(self._may_be_read(t) for t in changed):
                return _NOT
        if packet in _SCALES and len(tensors) == 1:
            made, call = args[0], (func, (self._hold(args[0]), *args[1:]), kwargs)
            written = [call[1][0]]
        elif func is aten.copy_.default:
            if (source := self._input(args[1])) is None:
                return _NOT
            made, target = args[0], self._hold(args[0])
            call, written = (func, (target, source), {}), [target]
        elif func is aten._foreach_copy_.default:
            sources = [self._input(t) for t in args[1]]
            if any(s is None for s in sources):
                return _NOT
            targets = [self._hold(t) for t in args[0]]
            made, call, written = None, (func, (targets, sources), {}), targets
        elif func in (aten.clone.default, aten._to_copy.default):
            if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
                return _NOT
            if (source := self._input(args[0])) is None:
                return _NOT
            about = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            form = kwargs.get("memory_format") or torch.preserve_format
            made = torch.empty_like(args[0], memory_format=form, **about)
            target = self._hold(made)
            call, written = (aten.copy_.default, (target, source), {}), [target]
        elif func is aten.cat.default:
            sources = [self._input(t) for t in args[0]]
            if any(s is None for s in sources) or len({t.dtype for t in args[0]}) > 1:
                return _NOT
            shape = aten.cat.default([t.to("meta") for t in args[0]], *args[1:])
            made = torch.empty_strided(
                shape.size(), shape.stride(), dtype=shape.dtype, device=tensors[0].device
            )
            target = self._hold(made)
            call, written = (aten.cat.out, (sources, *args[1:]), {"out": target}), [target]
        else:
            return _NOT
        self._queue.append(_Queued(*call, [_span(t) for t in written]))
        return made

    def _input(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What the queue keeps of a tensor that it reads; None if that would be much."""
        if _storage(tensor) in self._held:
            return self._hold(tensor)
        return tensor.clone() if tensor.nbytes <= _SMALL else None

    def _may_be_read(self, tensor: torch.Tensor) -> bool:
        """Whether somebody may read its memory by no operation: what is not torch's own, or shared."""
        storage = tensor.untyped_storage()
        return storage._cdata in self._exposed or not storage.resizable() or storage.is_shared()

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.data  # its changes are none of the original's, as autograd counts them
        storage = _storage(alias)
        self._held[storage] = self._held.get(storage, 0) + 1
        return alias

    # -- a restore -------------------------------------------------------------------------------

    def _while_restoring(
        self,
        func: Any,
        tensors: list[torch.Tensor],
        missing: list[torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        assert self._restored is not None
        if func.is_view or func in _NEED_NOTHING:
            return func(*args, **kwargs)
        targets: list[torch.Tensor] = []
        if func.overloadpacket in _OVERWRITE:
            targets = [args[0]]
        elif func is aten._foreach_copy_.default:
            targets = list(args[0])
        read = [t for t in missing if not any(t is target for target in targets)]
        if any(not self._restored.covers(_span(t)) for t in read):
            self._incomplete = self._incomplete or f"while the state was restored, {func} needed it"
        result = func(*args, **kwargs)
        for target in targets:
            if (span := _span(target)).dense:
                self._restored.add(span)
        return result

    def _left(self, restored: _Bytes) -> str:
        """Whether anything of the queue is left that somebody still has, and was not overwritten."""
        known = _counted_beside_tensors()
        for each in self._queue:
            for span in each.written:
                lives = torch._C._storage_Use_Count(span.storage) > self._held[span.storage] + known
                if lives and not restored.covers(span):
                    return f"the restore leaves {span.stop - span.start} bytes of a tensor as they were"
        return ""

    # -- what is not an operation ------------------------------------------------------------------

    def _reading(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._on:
                is_storage = isinstance(owner, torch.UntypedStorage)
                storage = owner._cdata if is_storage else _storage(owner)
                if storage in self._held:
                    restored = None if is_storage else self._restored
                    if restored is None or not restored.covers(_span(owner)):
                        self._needed(f"{type(owner).__name__}.{name} needs it")
                if storage and storage not in self._exposed:
                    self._exposed[storage] = StorageWeakRef(owner if is_storage else owner.untyped_storage())
            return original(owner, *args, **kwargs)

        return read

    def _writing(self, original: Callable[..., str]) -> Callable[..., str]:
        def write(tensor: torch.Tensor, **kwargs: Any) -> str:
            if self._on and self._text_unread and _storage(tensor) in self._held:
                return f"tensor(..., size={tuple(tensor.shape)})"
            return original(tensor, **kwargs)

        return write

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            self._generator.settle()
            return original(*args, **kwargs)

        return ask


_NOT = object()


@dataclass(frozen=True)
class _Span:
    """Bytes of a storage."""

    storage: int
    start: int
    stop: int
    dense: bool
    """Whether the tensor has each of them."""


def _span(tensor: torch.Tensor) -> _Span:
    size, start = tensor.element_size(), int(tensor.storage_offset())
    extent = 0
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum(int((length - 1) * step) for length, step in steps)
    return _Span(_storage(tensor), start * size, (start + extent) * size, extent == tensor.numel())


class _Bytes:
    """Which bytes of which storages."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def add(self, span: _Span) -> None:
        self._spans.setdefault(span.storage, []).append((span.start, span.stop))

    def covers(self, span: _Span) -> bool:
        at = span.start
        for start, stop in sorted(self._spans.get(span.storage, ())):
            if start > at:
                break
            at = max(at, stop)
        return at >= span.stop


@dataclass(frozen=True)
class _Queued:
    """An operation that was put off."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    written: list[_Span]
    draws: Position | None = None
    numbers: int = 0


def _caller() -> str:
    """The line that is executed, neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def _counted_beside_tensors() -> int:
    """By how much more than its tensors a storage's count of uses is, once it was looked at from Python."""
    tensor = torch.empty(1)
    return torch._C._storage_Use_Count(_storage(tensor)) - 1


def _storage(tensor: torch.Tensor) -> int:
    """Which memory it has; 0 for one that has none of its own."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
