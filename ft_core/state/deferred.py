"""Initialisation that is put off, because a restore is to overwrite it: a newcomer's.

Almost all that a newcomer's start-up does with a big model is to draw weights, which the restore then
overwrites. `Deferred` sees every operation of the script's threads before torch does it. What fills a tensor
with random numbers is not done but queued (see `undone`), and so is what only moves such content on or scales
it. The content of these tensors does not exist. So

- an operation that needs it has it done first, as it would have been, and sees what it would have seen. That
  is so for all operations but those that are known to need nothing, and for all else that reads memory;
- the random generator stands where the queued draws leave it whenever somebody asks: they are counted, and
  it is brought there at once (see `owed`);
- what a restore overwrites is seen, byte by byte. If it leaves anything of the queue that somebody still has,
  that is done, and the state is restored again.

Nothing is assumed of the script, of a framework or of what an adapter restores. What is not seen: who reads
weights from C++ without an operation, and who asks `torch.default_generator` itself for its state.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef

from ft_core import patched
from ft_core.patching import Patch
from ft_core.process.timeline import timeline
from ft_core.state import mersenne
from ft_core.state.memory import populate
from ft_core.state.owed import OwingGenerator, draws_of
from ft_core.state.undone import Bytes, Operation, Undone, span_of, storage_of, tensors_of, users_of
from ft_core.state.watch import Compiler, Watch, is_traced, watch

log = logging.getLogger(__name__)
aten = torch.ops.aten

_FILLS = {aten.normal_.default, aten.uniform_.default}
_SCALES = {aten.mul_, aten.add_, aten.sub_, aten.div_, aten.clamp_, aten.erfinv_, aten.fill_, aten.zero_}
"""In place, of one tensor and numbers."""
_MAKE = {
    aten.empty, aten.empty_strided, aten.zeros, aten.ones, aten.full,
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full,
}  # fmt: skip
"""Memory of its own; of a tensor that it is given it needs no more than the shape and type."""
_COPY = {aten.clone, aten._to_copy, aten.cat}
"""Memory of their own, too."""
_VIEWS = {aten.detach.default, aten._unsafe_view.default}
"""Beside those that torch calls so."""
_OVERWRITE = {aten.fill_, aten.zero_, aten.copy_}
_INNER = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
_COMPARE = {"torch", "deepspeed", "megatron", "ft_core", "ft_deepspeed", "ft_megatron"}
"""Packages that ask for addresses to compare them."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SMALL = 1 << 20
"""Bytes of real content that are kept for the queue."""
_NOT = object()

DEFERRED = "FT_DEFERRED_INIT"
"""Of `ftrun`'s environment: see `is_wanted`."""


def is_wanted(on_gpu: bool) -> bool:
    """Whether newcomers put off their initialisation: 0 says that they do not, 1 that they do it with weights
    that come to a GPU as well. Kernels of extensions read there what torch's dispatcher does not see."""
    return os.environ.get(DEFERRED, "0" if on_gpu else "1") == "1"


class Deferred:
    """Active from `begin` to `end`. These two, and what is put off: main thread."""

    def __init__(self) -> None:
        self._undone = Undone()
        self._own: dict[int, StorageWeakRef] = {}
        """Storages that were seen to be made, and that nobody can read past every operation, as numpy could
        that has their memory."""
        self._most = 1000
        """That there may be before those that are gone are forgotten."""
        self._generator = OwingGenerator()
        self._restored: Bytes | None = None
        """While something is restored: what of it is."""
        self._incomplete = ""
        """What showed that a restore does not overwrite everything."""
        self._began = self._on = self._busy = self._forked = self._text_unread = False
        self._looks = self._told = False
        self._main = 0
        self._lock = threading.RLock()
        """Of all here, for the script's threads. It is not held while an operation of theirs is done."""
        self._watch = Watch(self.operation)
        self._compiler = Compiler(self._compiling)
        self._patches, self._outer = ExitStack(), ExitStack()
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
        self._began = self._on = True
        self._main = threading.get_ident()
        self._replace(self._outer, patched.THREADS, self._starting)
        self._replace(self._outer, patched.PARAMETERS, self._registering)
        self._outer.enter_context(self._compiler.imported_meanwhile())
        self._follow_forks()
        self._look()

    def _look(self) -> None:
        """See what the script does."""
        self._looks = True
        self._replace(self._patches, patched.READERS, self._reading)
        self._replace(self._patches, patched.ADDRESSES, self._addressing)
        self._replace(self._patches, patched.CONVERSIONS, self._converting)
        self._replace(self._patches, patched.TENSOR_TEXT, self._writing)
        self._replace(self._patches, patched.GENERATOR, self._asking)
        self._replace(self._patches, patched.SCRIPTED, self._calling)
        self._replace(self._patches, patched.MODES, self._entering)
        self._compiler.follow()
        if watch() is None:
            self._watch.begin()

    def _look_away(self) -> None:
        """Where nothing is put off."""
        self._looks = False
        self._watch.end()
        self._compiler.leave()
        self._patches.close()
        self._own.clear()

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
        if not self._began:
            return
        with self._lock:
            if why:
                self.complete(why, level)
            self._generator.settle()
            self._began = self._on = False
            self._undone.clear()
        timeline.facts |= {"skipped": self.skipped - self.done, "drawn": self.done}
        self._look_away()
        self._outer.close()

    def restoring(self, restore: Callable[[], None]) -> bool:
        """Run `restore`, which overwrites what was put off, and end this.

        Returns whether it has left anything of that: then all was done, and it is to be restored again.
        """
        if not self._began:
            restore()
            return False
        self._restored, self._incomplete = Bytes(), ""
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
                self._restored.add(span_of(tensor))

    def prepare(self) -> None:
        """Before anybody waits for the restore: have the kernel give the memory that it is to write."""
        with self._lock:
            for storage in self._undone.memory():
                if storage.device.type == "cpu":
                    populate(storage.data_ptr(), storage.nbytes())

    def complete(self, why: str, level: int = logging.WARNING) -> None:
        """Do all that was put off, and say why: the first time at that level."""
        with self._lock:
            if self._undone:
                self._account(self._doing(lambda: self._undone.do_all(self._generator)), why, level)

    def _do(self, storages: Iterable[int], why: str) -> None:
        """What was put off and has to do with these, because of `why`."""
        numbers = self._doing(lambda: self._undone.do(storages, self._generator))
        self._account(numbers, why, logging.WARNING)

    def _doing(self, do: Callable[[], int]) -> int:
        threads = torch.get_num_threads()
        self._busy = True
        try:
            if self._forked:
                torch.set_num_threads(1)  # it has none of its parent's, and would wait for them
            with torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
                return do()
        finally:
            self._busy = False
            if self._forked:
                torch.set_num_threads(threads)

    def _account(self, numbers: int, why: str, level: int) -> None:
        self.done += numbers
        level, self._told = logging.DEBUG if self._told else level, True
        log.log(
            level,
            "initialisation that was left to the restore is done after all, %d numbers for a start: %s (%s)",
            *(numbers, why, _caller()),
        )

    # -- operations ------------------------------------------------------------------------------

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of one, of any of the script's threads."""
        if not (self._on and self._looks):
            return func(*args, **kwargs)
        with self._lock:
            if not self._busy:
                with torch._C.DisableTorchFunction():  # what the script has for functions is not for these
                    made = self._made(func, args, kwargs)
                if made is not _NOT:
                    return made
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Its result; _NOT if it is ordinary, and may be done without the lock: it may wait for another
        thread."""
        tensors = [*tensors_of(args), *tensors_of(kwargs.values())]
        if not isinstance(func, torch._ops.OpOverload) or any(type(t) not in _PLAIN for t in tensors):
            # What it consists of is not seen here.
            self._all_needed(f"{func} may need it")
            self._generator.settle()
            return _NOT
        is_main = threading.get_ident() == self._main
        if is_main and func.overloadpacket in _MAKE:
            return self._owned(func(*args, **kwargs))
        fills = is_main and func in _FILLS and self._restored is None
        if fills and (made := self._fill(func, args, kwargs)) is not None:
            return made
        if missing := [t for t in tensors if storage_of(t) in self._undone]:
            if self._restored is not None:
                return self._while_restoring(func, missing, args, kwargs)
            if func.is_view or func in _VIEWS:
                return self._view(func, missing, args, kwargs)
            if is_main and (deferred := self._defer(func, tensors, args, kwargs)) is not _NOT:
                return deferred
            self._needed(map(storage_of, missing), f"{func} needs it")
        if is_main and func.overloadpacket in _COPY:
            return self._owned(func(*args, **kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._generator.settle()
            return func(*args, **kwargs)  # before another thread can make the generator owe anything
        if func.namespace not in ("aten", "prim", "c10d"):
            self._generator.settle()
        return _NOT

    def _needed(self, storages: Iterable[int], why: str) -> None:
        if self._restored is None:
            self._do(storages, why)
        else:
            self._all_needed(why)

    def _all_needed(self, why: str) -> None:
        if self._restored is None:
            self.complete(why)
        elif self._undone:
            self._incomplete = self._incomplete or f"while the state was restored, {why}"

    def _view(
        self, func: Any, missing: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What torch calls a view is one if it has the memory. It may be a copy, as `to` is at times; in
        inference mode that is not taken apart before it comes here."""
        made = func(*args, **kwargs)
        storages = {storage_of(t) for t in missing}
        if all(storage_of(t) in storages for t in tensors_of([made])):
            return made
        self._needed(storages, f"{func} needs it")
        return func(*args, **kwargs)

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
        alias = _alias(tensor)
        written = [span_of(alias)]
        self._undone.put(Operation(func, (alias, *args[1:]), {}, written, position, tensor.numel()))
        self.skipped += tensor.numel()
        return tensor

    def _defer(
        self, func: Any, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The operation's result, or _NOT if it is not put off: it is another, fails, or would keep much."""
        made: Any
        if func is aten.copy_.default or func is aten._foreach_copy_.default:
            changed = args[0] if isinstance(args[0], list) else [args[0]]
            if any(self._may_be_read(t) for t in changed):
                return _NOT
        if func.overloadpacket in _SCALES and len(tensors) == 1 and not _fails(func, args, kwargs):
            made, target = args[0], _alias(args[0])
            call, written = (func, (target, *args[1:]), kwargs), [target]
        elif func is aten.copy_.default and not _fails(func, args, kwargs):
            if (source := self._input(args[1])) is None:
                return _NOT
            made, target = args[0], _alias(args[0])
            call, written = (func, (target, source), {}), [target]
        elif func is aten._foreach_copy_.default and not _fails(func, args, kwargs):
            sources = [self._input(t) for t in args[1]]
            if any(s is None for s in sources):
                return _NOT
            targets = [_alias(t) for t in args[0]]
            made, call, written = None, (func, (targets, sources), {}), targets
        elif func in (aten.clone.default, aten._to_copy.default):
            if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
                return _NOT
            if (source := self._input(args[0])) is None:
                return _NOT
            about = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            form = kwargs.get("memory_format") or torch.preserve_format
            made = self._owned(torch.empty_like(args[0], memory_format=form, **about))
            target = _alias(made)
            call, written = (aten.copy_.default, (target, source), {}), [target]
        elif func is aten.cat.default and not _fails(func, args, kwargs):
            sources = [self._input(t) for t in args[0]]
            if any(s is None for s in sources) or len({t.dtype for t in args[0]}) > 1:
                return _NOT
            shape = aten.cat.default([t.to("meta") for t in args[0]], *args[1:])
            about = {"dtype": shape.dtype, "device": tensors[0].device}
            made = self._owned(torch.empty_strided(shape.size(), shape.stride(), **about))
            target = _alias(made)
            call, written = (aten.cat.out, (sources, *args[1:]), {"out": target}), [target]
        else:
            return _NOT
        self._undone.put(Operation(*call, [span_of(t) for t in written]))
        return made

    def _input(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What the queue keeps of a tensor that it reads; None if that would be much."""
        if storage_of(tensor) in self._undone:
            return _alias(tensor)
        return tensor.clone() if tensor.nbytes <= _SMALL else None

    def _owned(self, made: torch.Tensor) -> torch.Tensor:
        """It was made just now."""
        if len(self._own) >= self._most:
            self._own = {storage: known for storage, known in self._own.items() if not known.expired()}
            self._most = 2 * len(self._own) + 1000
        if type(made) in _PLAIN and (storage := storage_of(made)):
            self._own[storage] = StorageWeakRef(made.untyped_storage())
        return made

    def _may_be_read(self, tensor: torch.Tensor) -> bool:
        """Whether somebody may read its memory by no operation: what is not torch's own, or shared."""
        storage = tensor.untyped_storage()
        return storage._cdata not in self._own or not storage.resizable() or storage.is_shared()

    # -- a restore -------------------------------------------------------------------------------

    def _while_restoring(
        self, func: Any, missing: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        assert self._restored is not None
        if func.is_view or func in _VIEWS or func.overloadpacket in _MAKE:
            made = func(*args, **kwargs)
            storages = {storage_of(t) for t in missing}
            if func.overloadpacket in _MAKE or all(storage_of(t) in storages for t in tensors_of([made])):
                return made
        targets: list[torch.Tensor] = []
        if func.overloadpacket in _OVERWRITE:
            targets = [args[0]]
        elif func is aten._foreach_copy_.default:
            targets = list(args[0])
        read = [t for t in missing if not any(t is target for target in targets)]
        if any(not self._restored.covers(span_of(t)) for t in read):
            self._incomplete = self._incomplete or f"while the state was restored, {func} needed it"
        result = func(*args, **kwargs)
        for target in targets:
            if (span := span_of(target)).dense:
                self._restored.add(span)
        return result

    def _left(self, restored: Bytes) -> str:
        """Whether anything of the queue is left that somebody still has, and was not overwritten."""
        left = next((span for span in self._undone.written() if not restored.covers(span)), None)
        if left is None:
            return ""
        return f"the restore leaves {left.stop - left.start} bytes of a tensor as they were"

    # -- what is not an operation ------------------------------------------------------------------

    def _replace(self, until: ExitStack, patches: Iterable[Patch], by: Callable[[Any, str], Any]) -> None:
        for patch in patches:
            if patch.exists():
                original = patch.original()
                made = by(original, patch.name)
                if callable(original):
                    functools.update_wrapper(made, original)
                until.enter_context(patch.replaced(made))

    def _read(self, owner: torch.Tensor | torch.UntypedStorage, name: str) -> None:
        """Somebody reads its content by `name`, and may do so later."""
        with self._lock, torch._C.DisableTorchFunction():
            if not self._on:
                return
            if isinstance(owner, torch.Tensor):
                storage, restored = storage_of(owner), self._restored
                there = restored is not None and restored.covers(span_of(owner))
            else:
                storage, there = owner._cdata, False
            if storage in self._undone and not there:
                self._needed([storage], f"{type(owner).__name__}.{name} needs it")
            self._own.pop(storage, None)

    def _reading(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Of a tensor, a storage, or what is given one."""

        def read(*args: Any, **kwargs: Any) -> Any:
            if self._on:
                for each in (*args, *kwargs.values()):
                    if isinstance(each, torch.Tensor | torch.UntypedStorage):
                        self._read(each, name)
            return original(*args, **kwargs)

        return read

    def _addressing(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        read = self._reading(original, name)

        def address(owner: Any) -> Any:
            module = sys._getframe(1).f_globals.get("__name__", "")
            compares = module.partition(".")[0] in _COMPARE and module != "torch._tensor"
            return original(owner) if compares else read(owner)

        return address

    def _converting(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """To a number: as `_reading`, but nobody has the memory afterwards."""

        def convert(tensor: Any, *args: Any) -> Any:
            if self._on and self._undone:
                with self._lock, torch._C.DisableTorchFunction():
                    missing = storage_of(tensor) in self._undone
                    if missing and (self._restored is None or not self._restored.covers(span_of(tensor))):
                        self._needed([storage_of(tensor)], f"{type(tensor).__name__}.{name} needs it")
            return original(tensor, *args)

        return convert

    def _writing(self, original: Callable[..., str], name: str) -> Callable[..., str]:
        def write(tensor: torch.Tensor, **kwargs: Any) -> str:
            if self._on and self._text_unread and storage_of(tensor) in self._undone:
                return f"tensor(..., size={tuple(tensor.shape)})"
            return original(tensor, **kwargs)

        return write

    def _asking(self, original: torch.Generator, name: str) -> _Asked:
        def settle() -> None:
            with self._lock:
                self._generator.settle()

        return _Asked(original, settle)

    # -- other threads, compiled code, forked processes --------------------------------------------

    def _starting(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A thread: the script's are watched."""

        def start(thread: threading.Thread) -> None:
            if not self._on or thread.name.startswith("ft-"):
                return original(thread)
            watch = Watch(self.operation)
            watch.begin()
            try:
                return original(thread)
            finally:
                watch.end()

        return start

    def _calling(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """TorchScript."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return original(*args, **kwargs)
            self._unseen("TorchScript is called")
            if (here := watch()) is not None:
                here.end()
            try:
                return original(*args, **kwargs)
            finally:
                if here is not None and (self._looks or here is not self._watch):
                    here.begin()

        return call

    def _entering(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A dispatch mode: of one of torch's own, operations are traced."""

        def enter(mode: Any) -> Any:
            if self._on and mode.is_infra_mode():
                self._compiling()
            return original(mode)

        return enter

    def _compiling(self) -> None:
        """Compiled code is called by this thread. The main one is watched again when it makes a weight."""
        self._unseen("compiled code is called")
        if threading.get_ident() == self._main:
            self._look_away()
            return
        self._on = False  # of what this thread does from here on nothing is seen
        self._compiler.leave()
        if (here := watch()) is not None:
            here.end()

    def _unseen(self, why: str) -> None:
        with self._lock:
            self._all_needed(why)
            self._generator.settle()

    def _registering(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def register(module: Any, name: str, param: Any) -> Any:
            away = self._on and not self._looks and threading.get_ident() == self._main
            if away and not is_traced():
                self._look()
                if type(param) is torch.nn.Parameter and users_of(storage_of(param)) == 1:
                    self._owned(param)
            return original(module, name, param)

        return register

    def _follow_forks(self) -> None:
        """A forked process has what was put off as well, and does of it what it reads."""
        here = weakref.ref(self)

        def before() -> None:
            if (deferred := here()) is not None:
                deferred._lock.acquire()

        def after() -> None:
            if (deferred := here()) is not None:
                deferred._lock.release()

        def after_in_child() -> None:
            after()
            if (deferred := here()) is not None:
                deferred._forked = True
                if not deferred._undone:
                    deferred.end()

        os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


class _Asked:
    """A generator that is where it should be before anybody has anything of it but its seed, or sets it."""

    def __init__(self, generator: torch.Generator, settle: Callable[[], None]) -> None:
        self._asked, self._settle = generator, settle

    def __getattr__(self, name: str) -> Any:
        if name not in ("manual_seed", "set_state", "seed", "initial_seed"):
            self._settle()
        return getattr(self._asked, name)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data  # its changes are none of the original's, as autograd counts them


def _fails(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation would: tried without memory. Who has called it is to be told, and at once."""

    def bare(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return [bare(each) for each in value] if isinstance(value, list) else value

    changed = [] if func is aten.cat.default else tensors_of(args[:1])
    if any(
        step == 0 and length > 1 for t in changed for length, step in zip(t.shape, t.stride(), strict=True)
    ):
        return True
    try:
        if func.overloadpacket in _SCALES:  # without memory it takes any number
            func(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs)
        else:
            func(*map(bare, args), **kwargs)
    except Exception:  # whatever an operation can raise: it is done, and will
        return True
    return False


def _caller() -> str:
    """The line that is executed, neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
