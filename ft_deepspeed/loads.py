"""Batches of steps that are done, which a newcomer's script draws: what is loaded of them, and what is not.

A newcomer draws what its predecessor drew, and computes nothing of it. To load it takes longest, for nothing.
So its loaders draw the indices, and load a batch when somebody looks at what is in it. That comes to the same
if loading changes nothing by which later batches are loaded. The predecessor has told of it: whether loading
has drawn random numbers, or changed the data set, the collator or a variable of the script's, and whether the
batches of a loader are all of one structure. What is seen by nobody (a file that is read on) shows where the
newcomer has come to where the others are: the last batch is another one.
"""

from __future__ import annotations

import mmap
import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import dataloader
from xxhash import xxh3_64_hexdigest

from ft_core.patching import replaced
from ft_core.state import rng
from ft_deepspeed import patched
from ft_deepspeed.own_code import scripts
from ft_deepspeed.script_state import ScriptState
from ft_deepspeed.unread import Structure, UnreadBatch, is_plain, leaves

OTHERS = (
    "it loads data by what was loaded before, in a way that is not seen (such as a file that is read on; a "
    "checkpoint that it loads by itself, or Trainer, has newcomers pass nothing)"
)
_BYTES = 64 << 10
"""At the beginning of a tensor, by which a batch is known."""
_KINDS = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
_INSIDE = ("dataset", "datasets")
"""Attributes of data sets that have others in them."""
_DEEPEST = 4
_EACH = 8
"""So many batches are loaded with a look at what that changes, and then one of as many."""


class _Reading:
    """One iteration over a loader."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        """How its batches are made up, by the first one."""
        self.drawn: deque[str] = deque()
        """Marks of the indices of batches that are yet to come, in the order of the draws."""
        self.behind = False
        """Whether its processes were not told what to load next."""


class Loads:
    """What the loaders of a script have loaded, and may leave out on a newcomer."""

    def __init__(self, model: torch.nn.Module, position: Callable[[], int]) -> None:
        """`position`: how many steps the script has done; -1 in start-up."""
        self._model, self._position = model, position
        self._changes = mmap.mmap(-1, 1)
        """Shared with the loaders' processes: whether what was loaded has changed anything."""
        self._alike = True
        """Whether the batches of each iteration were of one structure."""
        self._newest = ["", ""]
        """Marks of the newest batch that the script has: of its indices, and of what is in it."""
        self._until = -1
        """The step that a newcomer's script is to come to."""
        self._noted = ["", ""]
        """The newest batch of the predecessor there."""
        self.left_out = 0
        """Batches that were not loaded, or have yet to be."""
        self._leaves = False
        """Whether there were any."""
        self._unread: list[UnreadBatch] = []
        """Those of them that somebody may still look at, and the newest."""
        self._readings: WeakKeyDictionary[Any, _Reading] = WeakKeyDictionary()
        self._loads_one = False
        """Whether one batch is loaded that was left out."""
        patched.BEGIN_DATA_AGAIN.wrap(self._beginning_again)
        patched.FETCHER.wrap(self._fetcher)
        patched.NEXT_INDEX.wrap(self._drawing)
        patched.TELL_PROCESS.wrap(self._telling)
        for hook in patched.NEXT_DATA:
            hook.wrap(self._reading)

    # -- what goes with a version -----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What of it goes into the envelope."""
        return {"same": self._alike and not self._changes[0], "newest": list(self._newest)}

    def follow(self, noted: dict[str, Any] | None, until: int) -> None:
        """From here on the script passes steps until it has done `until`. `noted`: the state there."""
        self._until, self._noted = -1, ["", ""]
        if noted is None or not noted["same"]:
            self._changes[0] = 1
            return
        self._until, self._noted = until, noted["newest"]

    def lead(self) -> str:
        """From now on the script leads. Returns what is wrong with its data, if anything is."""
        noted, self._noted, self._until = self._noted, ["", ""], -1
        if not self._leaves:
            return ""
        self._leaves = False
        self._read_all()
        return OTHERS if self._newest[0] == noted[0] and self._newest[1] != noted[1] else ""

    # -- hooks ------------------------------------------------------------------------------------

    def _beginning_again(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def begin_again(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            self._read_all()
            self._readings[iterator] = _Reading()
            if loader.num_workers and not _forks(loader):
                self._changes[0] = 1  # what they load is not seen
            reset(iterator, loader, first_iter)

        return begin_again

    def _drawing(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def next_index(iterator: Any) -> Any:
            index = draw(iterator)
            if not self._loads_one and type(iterator) in _KINDS:
                self._of(iterator).drawn.append(xxh3_64_hexdigest(repr(index).encode()))
            return index

        return next_index

    def _telling(self, tell: Callable[..., Any]) -> Callable[..., Any]:
        def try_put_index(iterator: Any) -> None:
            reading = self._of(iterator)
            if iterator._send_idx and not self._loads_one and self._leaves_out(iterator, reading):
                reading.behind = True
                return
            tell(iterator)

        return try_put_index

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def next_data(iterator: Any) -> Any:
            if type(iterator) not in _KINDS:
                return read(iterator)
            reading = self._of(iterator)
            if not self._leaves_out(iterator, reading):
                if reading.behind:
                    self._catch_up(reading, iterator)
            elif reading.structure is not None and not _has_told(iterator):
                return self._left_out(reading, reading.structure, iterator, partial(read, iterator))
            data = read(iterator)
            self._note(reading, data)
            return data

        return next_data

    def _fetcher(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """What reads a batch, in this process or in one of the loader's, which is forked from it."""

        def create_fetcher(kind: int, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            fetcher = make(kind, dataset, *args, **kwargs)
            if kind != dataloader._DatasetKind.Map:
                return fetcher
            fetch, count = fetcher.fetch, 0
            look = _Look(fetcher, self._model)

            def fetching(index: Any) -> Any:
                nonlocal count
                count += 1
                if self._changes[0] or (count > _EACH and count % _EACH):
                    return fetch(index)
                before = look()
                found = fetch(index)
                if before is None or not _alike(before, look()):
                    self._changes[0] = 1
                return found

            fetcher.fetch = fetching
            return fetcher

        return create_fetcher

    # -- what is left out -------------------------------------------------------------------------

    def _of(self, iterator: Any) -> _Reading:
        return self._readings.setdefault(iterator, _Reading())

    def _leaves_out(self, iterator: Any, reading: _Reading) -> bool:
        """Whether batches that it draws now are of steps that are done, and need not be loaded: but for the
        last one, by which it is seen whether they are what they were."""
        return (
            0 <= self._position() < self._until - 1
            and self._alike
            and not self._changes[0]
            and threading.current_thread() is threading.main_thread()
            and iterator._dataset_kind == dataloader._DatasetKind.Map
            and getattr(iterator, "_in_order", True)
            and (reading.structure is None or reading.structure.is_known)
        )

    def _left_out(
        self, reading: _Reading, structure: Structure, iterator: Any, read: Callable[[], Any]
    ) -> Any:
        try:
            index = iterator._next_index()
        except StopIteration:
            self._read_all()
            return read()  # as it ends
        newest = [reading.drawn.popleft(), ""]

        def load() -> Any:
            with self._one(iterator, index):
                if type(iterator) is _KINDS[1]:
                    iterator._try_put_index()
                data = read()
            self.left_out -= 1
            newest[1] = _mark(data)
            return data

        batch = UnreadBatch(load)
        self.left_out += 1
        self._leaves = True
        self._unread = [each for each in self._unread if each.is_used and not each.is_read]
        self._unread.append(batch)
        self._newest = newest
        return structure.unread(batch)

    def _read_all(self) -> None:
        """Load what somebody may still look at, and the newest."""
        for at, batch in enumerate(self._unread):
            if batch.is_used or at == len(self._unread) - 1:
                batch.read()
        self._unread.clear()

    @contextmanager
    def _one(self, iterator: Any, index: Any) -> Iterator[None]:
        """Whatever is loaded here is the batch of `index`."""
        self._loads_one = True
        try:
            with replaced(iterator, {"_sampler_iter": iter([index])}):
                yield
        finally:
            self._loads_one = False

    def _catch_up(self, reading: _Reading, iterator: Any) -> None:
        """Its processes load ahead again, once what was left out, and may be looked at, is loaded."""
        reading.behind = False
        self._read_all()
        sent = -1
        while sent != iterator._send_idx and (
            iterator._tasks_outstanding < iterator._prefetch_factor * iterator._num_workers
        ):
            sent = iterator._send_idx
            iterator._try_put_index()

    def _note(self, reading: _Reading, data: Any) -> None:
        if reading.structure is None:
            reading.structure = Structure(data)
        elif not reading.structure.fits(data):
            self._alike = False
        self._newest = [reading.drawn.popleft() if reading.drawn else "", _mark(data)]


class _Look:
    """What there is that loading may change. None: there is no telling."""

    def __init__(self, fetcher: Any, model: torch.nn.Module) -> None:
        self._fetcher, self._model = fetcher, model
        self._state: ScriptState | None = None

    def __call__(self) -> tuple[dict[str, Any], list[Any]] | None:
        try:
            if self._state is None:
                own = ((name, space, False) for name, space in scripts(torch.nn.Module()))
                self._state = ScriptState([*_spaces(self._fetcher), *own], self._model)
            return rng.capture(), self._state.marks()
        except Exception:  # the script's objects, and its threads, may do anything meanwhile
            return None


def _alike(before: tuple[dict[str, Any], list[Any]], now: tuple[dict[str, Any], list[Any]] | None) -> bool:
    return now is not None and before[1] == now[1] and not rng.moved(before[0], now[0])


def _has_told(iterator: Any) -> bool:
    """Whether its processes, if it has any, load or have loaded what the script has yet to be given."""
    return type(iterator) is _KINDS[1] and bool(iterator._rcvd_idx < iterator._send_idx)


def _mark(data: Any) -> str:
    return " ".join(_mark_of(leaf) for leaf in leaves(data) if is_plain(leaf))


def _mark_of(leaf: torch.Tensor) -> str:
    few = leaf.detach().reshape(-1)[: max(1, _BYTES // max(1, leaf.element_size()))]
    return f"{tuple(leaf.shape)} {xxh3_64_hexdigest(few.contiguous().view(torch.uint8).numpy().data)}"


def _spaces(fetcher: Any) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The attributes of what is read from, and of what makes batches of it."""
    waiting = [("dataset", getattr(fetcher, "dataset", None), 0)]
    waiting += [("collator", getattr(fetcher, "collate_fn", None), _DEEPEST)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, (list, tuple)):
            waiting += [(f"{name}.{at}", part, depth) for at, part in enumerate(value)]
        elif hasattr(value, "__dict__") and not hasattr(value, "__code__") and not isinstance(value, type):
            yield name, vars(value), False
            inside = [(part, vars(value)[part]) for part in _INSIDE if part in vars(value)]
            if depth < _DEEPEST:
                waiting += [(f"{name}.{part}", found, depth + 1) for part, found in inside]


def _forks(loader: Any) -> bool:
    context = loader.multiprocessing_context
    name = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    return bool(name == "fork")
