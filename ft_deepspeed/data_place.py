"""Where a loop is in its data, and how a newcomer's loader comes there without what has been used up.

A loader of accelerate's reads one batch ahead, so at the top of an update the next batch has been read, with
the random states of that time. A newcomer's begins its iteration as the predecessor's began, leaves out the
indices of batches that were used, reads that one batch with its random states, and goes on with those of the
update. Batches are read and dropped where that is the only way to where the data are: of a stream, and where
the loader's own processes draw random numbers.
"""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from ft_core.patching import replaced
from ft_core.state import rng
from ft_deepspeed import patched
from ft_deepspeed.script_state import Opaque, ScriptState

_LARGEST = 64 << 10
"""Bytes of the first batch's samples, which complete the last batch of a stream."""
_CHAIN = ("base_dataloader", "batch_sampler", "sampler")
"""Attributes that lead from a loader to the samplers in it."""
_COUNTS = ("iteration",)
"""Attributes of a loader that count."""


class DataPlace:
    """The place of one loader in one iteration over it. Main thread."""

    def __init__(self) -> None:
        """Nothing is known until `begin`."""
        self.objection = ""
        """Why a newcomer's loader cannot come to where this one is, if so."""
        self._loader: Any = None
        self._objects: ScriptState | None = None
        self._begun: dict[str, Any] | None = None
        """How it was when its iteration began."""
        self._read: dict[str, Any] | None = None
        """And before the newest batch was read."""
        self._waits = self._wants_fetcher = False
        """Whether the next iterator, and what it reads with, are this loader's."""
        self._target: dict[str, Any] | None = None
        self._finish: Callable[[], None] = lambda: None
        self._synchronized: torch.Tensor | None = None
        self._moved = mmap.mmap(-1, 1)
        """Shared with the loader's processes: whether one of them has drawn a random number."""
        patched.BEGIN_DATA.wrap(self._beginning)
        patched.BEGIN_DATA_AGAIN.wrap(self._beginning_again)
        patched.FETCHER.wrap(self._fetcher)
        patched.SYNCHRONIZE.wrap(self._synchronizing)

    # -- while training goes on ------------------------------------------------------------------

    def begin(self, loader: Any, model: torch.nn.Module) -> None:
        """An iteration over `loader` is about to begin."""
        self._loader, self._begun, self._read, self._synchronized = loader, None, None, None
        self.objection = ""
        base = getattr(loader, "base_dataloader", loader)
        dataset, collate = getattr(base, "dataset", None), getattr(base, "collate_fn", None)
        objects = [("dataset", dataset), ("collator", collate)]
        spaces = [(name, vars(o), False) for name, o in objects if has_attributes(o)]
        self._objects = ScriptState(spaces, model)
        if not hasattr(base, "_index_sampler"):
            self.objection = "its batches do not come from a DataLoader"
        elif isinstance(dataset, IterableDataset) and not hasattr(loader, "skip_batches"):
            self.objection = "it reads a stream by a DataLoader that accelerate has not prepared"
        elif hasattr(base, "state_dict"):
            self.objection = "its loader has a state of its own"

    @contextmanager
    def drawing(self, first: bool) -> Iterator[None]:
        """Batches are drawn here. `first`: in this iteration."""
        self._waits = first
        try:
            yield
        finally:
            self._waits = False

    def capture(self, iterator: Any) -> dict[str, Any]:
        """Plain data, for `lead`. `iterator`: over the loader. Raises Opaque with a reason."""
        if self.objection:
            raise Opaque(self.objection)
        if self._begun is None:
            return {}
        assert self._objects is not None
        state: dict[str, Any] = {"begun": self._begun, "read": self._read}
        state["objects"] = self._objects.capture()
        state["moved"] = bool(self._moved[0])
        state["stream"] = isinstance(self._loader.dataset, IterableDataset)
        if state["stream"] and state["moved"] and not self._loader.num_workers:
            raise Opaque("its stream draws random numbers as it is read")
        if self._dispatches:
            state["ahead"] = _ahead(iterator, self._loader)
        return state

    @property
    def _dispatches(self) -> bool:
        return hasattr(self._loader, "_fetch_batches")

    def _reads_all(self, target: dict[str, Any]) -> bool:
        """Whether what was used up is read and dropped, since indices alone do not lead there."""
        return target["stream"] or (target["moved"] and self._loader.num_workers > 0)

    def _captured(self) -> dict[str, Any]:
        assert self._objects is not None
        state = {"rng": rng.capture(), "objects": {}, "generator": self._synchronized}
        state["samplers"] = {type(p).__name__: numbers for p, numbers in _numbers(self._loader)}
        try:
            state["objects"] = self._objects.capture()
        except Opaque as name:
            self.objection = f"of its data, {name} is no plain data"
        return state

    # -- on a newcomer ---------------------------------------------------------------------------

    @contextmanager
    def leading(self, target: dict[str, Any], batches: int, finish: Callable[[], None]) -> Iterator[None]:
        """Batches are drawn here: the first that comes is the one after `batches`. `finish` is called when
        all is as it was when `target` was captured, but for what it puts back itself."""
        self._target = {**target, "batches": batches}
        self._finish = finish
        self._begun, self._read = target["begun"], target["read"]
        loader = self._loader
        values: dict[str, Any] = {}
        if self._dispatches:
            values["_fetch_batches"] = self._first_fetch(loader, target["ahead"], batches)
            if (kept := target["ahead"]["first"]) is not None:
                values["slice_fn"] = self._first_slice(loader, kept)
        elif self._reads_all(target):
            values["skip_batches"] = batches
        self._moved[0] = target["moved"]
        for name, value in values.items():
            setattr(loader, name, value)
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @property
    def arrived(self) -> bool:
        """Whether `finish` was called."""
        return self._target is None

    def ends(self) -> None:
        """The iteration is over."""
        if hasattr(self._loader, "skip_batches"):
            self._loader.skip_batches = 0

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._objects is not None
        rng.restore(state["rng"])
        self._objects.restore(state["objects"])
        for part, numbers in _numbers(self._loader):
            vars(part).update(
                {k: v for k, v in state["samplers"].get(type(part).__name__, {}).items() if k in numbers}
            )

    def _done(self) -> None:
        assert self._objects is not None
        if (target := self._target) is not None:
            self._target = None
            self._objects.restore(target["objects"])
            self._finish()

    def _first_fetch(self, loader: Any, ahead: dict[str, Any], batches: int) -> Callable[[Any], Any]:
        fetch = loader._fetch_batches

        def first(iterator: Any) -> Any:
            del loader._fetch_batches
            if loader.state.process_index == 0:
                each = 1 if loader.split_batches or loader.submesh_tp else loader.state.num_processes
                for _ in range(batches * each):
                    next(iterator)
                with replaced(
                    _accelerate("data_loader"), {"broadcast_object_list": lambda objects, *_: objects}
                ):
                    found = fetch(iterator)
            else:
                found = None, [_structure(ahead), False]
            self._done()
            return found

        return first

    def _first_slice(self, loader: Any, kept: list[torch.Tensor]) -> Callable[..., Any]:
        cut = loader.slice_fn

        def first(batch: Any, *args: Any, **kwargs: Any) -> Any:
            loader.slice_fn = cut
            leaves, spec = pytree.tree_flatten(cut(batch, *args, **kwargs))
            return pytree.tree_unflatten([t.to(x.device) for t, x in zip(kept, leaves, strict=True)], spec)

        return first

    # -- hooks -----------------------------------------------------------------------------------

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_mine():
                original(iterator, loader, *args, **kwargs)
                return
            self._wants_fetcher = loader.num_workers == 0
            if (target := self._target) is None:
                self._begun = self._captured()
                self._moved[0] = loader.num_workers > 0 and not forks(loader)
                original(iterator, loader, *args, **kwargs)
                return
            self._restore(target["begun"])
            original(iterator, loader, *args, **kwargs)
            if not (self._dispatches or self._reads_all(target)):
                left_out = _LeftOut(iterator._index_sampler, target["batches"])
                iterator._index_sampler, iterator._sampler_iter = left_out, left_out.go_on(iterator)
            if loader.num_workers:
                self._done()

        return begin

    def _beginning_again(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def begin_again(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter and self._is_mine():
                self._begun = self._captured()
            reset(iterator, loader, first_iter)

        return begin_again

    def _is_mine(self) -> bool:
        mine, self._waits = self._waits, False
        return mine

    def _fetcher(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """What reads a batch, in this process or in one of the loader's, which is forked from it."""
        pid = multiprocessing.current_process().pid

        def create_fetcher(*args: Any, **kwargs: Any) -> Any:
            fetcher = make(*args, **kwargs)
            if multiprocessing.current_process().pid != pid:
                fetcher.fetch = self._noting(fetcher.fetch)
            elif self._wants_fetcher:
                self._wants_fetcher = False
                fetcher.fetch = self._fetching(fetcher.fetch)
            return fetcher

        return create_fetcher

    def _fetching(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        count = 0

        def fetching(index: Any) -> Any:
            nonlocal count
            count += 1
            target = self._target
            if target is None:
                self._read = self._captured()
                before = self._read["rng"]
                found = fetch(index)
                if not self._moved[0] and rng.moved(before, rng.capture()):
                    self._moved[0] = 1
                return found
            until = target["batches"] + 1 if target["stream"] else 1
            if not target["stream"]:
                self._restore(target["read"])
            found = fetch(index)
            if count == until and not self._dispatches:
                self._done()
            return found

        return fetching

    def _noting(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fetching(index: Any) -> Any:
            if self._moved[0]:
                return fetch(index)
            before, marks = rng.of_host(), _marks(self._objects)
            found = fetch(index)
            if rng.moved(before, rng.of_host()) or marks != _marks(self._objects):
                self._moved[0] = 1
            return found

        return fetching

    def _synchronizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def synchronize(rng_types: Any, generator: Any = None) -> None:
            if self._waits and self._target is not None:
                if generator is not None and (state := self._target["begun"].get("generator")) is not None:
                    generator.set_state(state)
                return
            original(rng_types, generator)
            if self._waits and generator is not None:
                self._synchronized = generator.get_state()

        return synchronize


class _LeftOut:
    """A sampler of batches without the first ones."""

    def __init__(self, sampler: Any, batches: int) -> None:
        self._sampler, self._batches = sampler, batches

    def __iter__(self) -> Iterator[Any]:
        return self._without(iter(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler) - self._batches

    def go_on(self, iterator: Any) -> Iterator[Any]:
        """With an iteration that has begun: some draw as they begin."""
        return self._without(iterator._sampler_iter)

    def _without(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in range(self._batches):
            next(batches)
        yield from batches


def has_attributes(value: Any) -> bool:
    """Whether it is an object with attributes of its own, and neither function nor class."""
    return hasattr(value, "__dict__") and not hasattr(value, "__code__") and not isinstance(value, type)


def _accelerate(module: str) -> Any:
    return importlib.import_module(f"accelerate.{module}")


def _numbers(loader: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The loader, and the samplers in it, with what they count."""
    for part in _chain(loader):
        names = _COUNTS if part is loader or part is getattr(loader, "base_dataloader", None) else vars(part)
        yield part, {name: vars(part)[name] for name in names if type(vars(part).get(name)) is int}


def _chain(loader: Any) -> Iterator[Any]:
    seen: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if any(part is other for other in seen) or not hasattr(part, "__dict__"):
            continue
        seen.append(part)
        yield part
        waiting.extend(vars(part)[name] for name in _CHAIN if vars(part).get(name) is not None)


def forks(loader: Any) -> bool:
    """Whether its processes are copies of this one."""
    context = loader.multiprocessing_context
    name = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    return bool(name == "fork")


def _marks(objects: ScriptState | None) -> Any:
    return objects.marks() if objects is not None else None


def _ahead(iterator: Any, loader: Any) -> dict[str, Any]:
    """What a loader knows that reads for all: what the next batch looks like, and the first samples."""
    found = iterator.gi_frame.f_locals if iterator.gi_frame is not None else {}
    info, stops = found.get("next_batch_info") or (None, True)
    first = found.get("first_batch")
    if info is None or stops:
        raise Opaque("its data are about to end")
    leaves, spec = pytree.tree_flatten(info)
    try:
        text = pytree.treespec_dumps(spec)
    except NotImplementedError:
        raise Opaque("its batches are neither dictionaries nor lists") from None
    kept = None if loader._drop_last else pytree.tree_leaves(first)
    if kept is not None and not all(isinstance(t, torch.Tensor) for t in kept):
        raise Opaque("its batches have more in them than tensors")
    if kept is not None and sum(t.nbytes for t in kept) > _LARGEST:
        raise Opaque("the samples that would complete its last batch are large (drop_last=True needs none)")
    shapes = [[list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] for leaf in leaves]
    return {"spec": text, "leaves": shapes, "first": kept}


def _structure(ahead: dict[str, Any]) -> Any:
    information = _accelerate("utils.dataclasses").TensorInformation
    leaves = [information(torch.Size(s), getattr(torch, dtype)) for s, dtype in ahead["leaves"]]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(ahead["spec"]))
