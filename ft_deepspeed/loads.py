"""Batches of steps that are done, which a newcomer's script draws: what is loaded of them, and what is not.

A newcomer draws what its predecessor drew, and computes nothing of it. To load it takes longest, for nothing.
So its loaders draw the indices, when they ever did, and load a batch when somebody looks at what is in it.
That comes to the same if loading changes nothing by which later batches are loaded. The predecessor has told
of it: whether loading has drawn random numbers, has failed, or has changed what can be seen (`look`), and
whether the batches of a loader are all of one structure. What is seen by nobody shows where the newcomer has
come to where the others are: the last batches are other ones.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import dataloader
from xxhash import xxh3_64_hexdigest

from ft_core.patching import replaced
from ft_core.state import rng
from ft_deepspeed import patched
from ft_deepspeed.data_place import forks
from ft_deepspeed.look import look, look_at_script
from ft_deepspeed.unread import Structure, UnreadBatch, leaves

T = TypeVar("T")

OTHERS = (
    "it loads data by what was loaded before, in a way that is not seen (such as a file that is read on; a "
    "checkpoint that it loads by itself, or Trainer, has newcomers pass nothing)"
)
_BYTES = 64 << 10
"""At the beginning of a tensor, by which a batch is known."""
_INDICES = 16
"""By so many a batch's are known."""
_AHEAD = 3
"""Steps before the last, whose batches are loaded: by these it is seen whether all is as it was, and a loop
that reads ahead has tensors of its own when it goes on."""
_EACH = 8
"""So many batches are loaded with a look at what that changes, and then one of as many."""
_SINGLE, _MANY = dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter


class _Reading:
    """One iteration over a loader."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        """How its batches are made up, by the first one."""
        self.drawn: deque[str] = deque()
        """Marks of the indices of batches that are yet to come, in the order of the draws."""
        self.withheld: deque[Any] = deque()
        """Indices that its processes were not told of."""


class Loads:
    """What the loaders of a script have loaded, and may leave out on a newcomer."""

    def __init__(self, position: Callable[[], int]) -> None:
        """`position`: how many steps the script has done; -1 in start-up."""
        self._position = position
        self._changes = mmap.mmap(-1, 1)
        """Shared with the loaders' processes: whether what was loaded has changed anything."""
        self._alike = True
        """Whether the batches of each iteration were of one structure."""
        self._newest: list[list[str]] = []
        """Marks of the indices, and of what is in it, for each batch of the newest step."""
        self._at = -1
        """Which step that is."""
        self._until = -1
        """The step that a newcomer's script is to come to."""
        self._noted: list[list[str]] = []
        """The newest batches of the predecessor there."""
        self.left_out = 0
        """Batches that were not loaded, or have yet to be."""
        self._leaves = self._objects = False
        """Whether there were any; and whether that was wrong."""
        self._unread: list[UnreadBatch] = []
        """Those of them that somebody may still look at."""
        self._readings: WeakKeyDictionary[Any, _Reading] = WeakKeyDictionary()
        self._fetched = 0
        self._one: Any = None
        """The iterator by which one batch is loaded that was left out."""
        self._lock = threading.RLock()
        """Who loads what was left out does so alone."""
        patched.BEGIN_DATA.wrap(self._beginning)
        patched.BEGIN_DATA_AGAIN.wrap(self._beginning_again)
        patched.FETCHER.wrap(self._fetcher)
        patched.NEXT_INDEX.wrap(self._drawing)
        patched.TELL_PROCESS.wrap(self._telling)
        for hook in patched.NEXT_DATA:
            hook.wrap(self._reading)

    # -- what goes with a version -----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What of it goes into the envelope."""
        return {"same": self._alike and not self._changes[0], "newest": [list(m) for m in self._newest]}

    def follow(self, noted: dict[str, Any] | None, until: int) -> None:
        """From here on the script passes steps until it has done `until`. `noted`: the state there."""
        self._until, self._noted = -1, []
        if noted is None or not noted["same"]:
            self._changes[0] = 1
            self._objects = self._leaves
            return
        self._until, self._noted = until, noted["newest"]

    def lead(self) -> str:
        """From now on the script leads. Returns what is wrong with its data, if anything is."""
        noted, self._noted, self._until = self._noted, [], -1
        if not self._leaves:
            return ""
        self._read_all()
        self._leaves = False
        pairs = zip(self._newest, noted, strict=False)
        known = (pair for pair in pairs if all(map(all, pair)))
        differ = any(own[0] == other[0] and own[1] != other[1] for own, other in known)
        return OTHERS if differ or self._objects or self._changes[0] else ""

    # -- hooks ------------------------------------------------------------------------------------

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(iterator: Any, *args: Any, **kwargs: Any) -> None:
            self._read_all()  # before its processes are forked
            original(iterator, *args, **kwargs)

        return begin

    def _beginning_again(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def begin_again(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            self._read_all()
            self._readings[iterator] = _Reading()
            if not forks(loader):
                self._changes[0] = 1  # what its processes load is not seen
            reset(iterator, loader, first_iter)

        return begin_again

    def _drawing(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def next_index(iterator: Any) -> Any:
            index = draw(iterator)
            if self._one is not iterator and type(iterator) in (_SINGLE, _MANY):
                self._of(iterator).drawn.append(_mark_of_index(index))
            return index

        return next_index

    def _telling(self, tell: Callable[..., Any]) -> Callable[..., Any]:
        def try_put_index(iterator: Any) -> None:
            with self._alone:
                if type(iterator) is _MANY and iterator._send_idx and self._one is not iterator:
                    reading = self._of(iterator)
                    if self._leaves_out(iterator, reading):
                        self._withhold(reading, iterator)
                        return
                tell(iterator)

        return try_put_index

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def next_data(iterator: Any) -> Any:
            if type(iterator) not in (_SINGLE, _MANY):
                return read(iterator)
            with self._alone:
                reading = self._of(iterator)
                if not self._leaves_out(iterator, reading):
                    self._catch_up(reading, iterator)
                elif reading.structure is not None and not _has_told(iterator):
                    return self._left_out(reading, reading.structure, iterator, partial(read, iterator))
                try:
                    data = read(iterator)
                finally:
                    mark = reading.drawn.popleft() if reading.drawn else ""
                self._note(reading, mark, data)
                return data

        return next_data

    def _fetcher(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """What reads a batch, in this process or in one of the loader's, which is forked from it."""

        def create_fetcher(kind: int, *args: Any, **kwargs: Any) -> Any:
            fetcher = make(kind, *args, **kwargs)
            return _Fetcher(fetcher, self) if kind == dataloader._DatasetKind.Map else fetcher

        return create_fetcher

    def fetch(self, fetcher: _Fetcher, index: Any) -> Any:
        """Load a batch, and see what that changes, or has changed since it was seen last."""
        if self._changes[0]:
            return fetcher.of_torch.fetch(index)
        self._fetched += 1
        # What is made only once, by the first, changes nothing.
        looks = 1 < self._fetched <= _EACH or self._fetched % _EACH == 0
        states = rng.of_host()
        same = not looks or fetcher.looks(index)
        try:
            found = fetcher.of_torch.fetch(index)
        except BaseException:
            self._changes[0] = 1  # whoever goes on after it has not used what was drawn
            raise
        if not same or (looks and not fetcher.is_same(index)) or rng.moved(states, rng.of_host()):
            self._changes[0] = 1
        return found

    # -- what is left out -------------------------------------------------------------------------

    @property
    def _alone(self) -> Any:
        """Nobody else loads what was left out, if there is any."""
        return self._lock if self._until >= 0 or self._leaves else nullcontext()

    def _of(self, iterator: Any) -> _Reading:
        if (found := self._readings.get(iterator)) is None:
            found = self._readings[iterator] = _Reading()
            seen = isinstance(getattr(iterator, "_dataset_fetcher", None), _Fetcher)
            if not seen and iterator._dataset_kind == dataloader._DatasetKind.Map:
                self._changes[0] = 1  # it has begun before anybody saw what it loads
        return found

    def _leaves_out(self, iterator: Any, reading: _Reading) -> bool:
        """Whether batches that it draws now are of steps that are done, and need not be loaded."""
        return (
            0 <= self._position() < self._until - _AHEAD
            and self._alike
            and not self._changes[0]
            and self._one is None
            and threading.current_thread() is threading.main_thread()
            and iterator._dataset_kind == dataloader._DatasetKind.Map
            and getattr(iterator, "_in_order", True)
            and (reading.structure is None or reading.structure.is_known)
        )

    def _withhold(self, reading: _Reading, iterator: Any) -> None:
        """Draw what its processes would be told of now."""
        try:
            reading.withheld.append(_own(iterator._next_index()))
        except StopIteration:
            return

    def _left_out(
        self, reading: _Reading, structure: Structure, iterator: Any, read: Callable[[], Any]
    ) -> Any:
        if type(iterator) is _MANY:
            if not reading.withheld:
                self._read_all()
                return read()  # as it ends
            index = reading.withheld.popleft()
            self._withhold(reading, iterator)
        else:
            try:
                index = _own(iterator._next_index())
            except StopIteration:
                self._read_all()  # the script may have the data set give others from here on
                raise
        if reading.drawn:
            reading.drawn.popleft()

        def load() -> Any:
            with self._loading(iterator, index):
                if type(iterator) is _MANY:
                    iterator._try_put_index()
                data = read()
            self.left_out -= 1
            return data

        batch = UnreadBatch(load, self._lock)
        self.left_out += 1
        self._leaves = True
        self._unread = [each for each in self._unread if each.is_used and not each.is_read]
        self._unread.append(batch)
        return structure.unread(batch)

    def _read_all(self) -> None:
        """Load what somebody may still look at."""
        with self._lock:
            unread, self._unread = self._unread, []
            for batch in unread:
                if batch.is_used:
                    batch.read()

    @contextmanager
    def _loading(self, iterator: Any, index: Any) -> Iterator[None]:
        """Whatever is loaded here is the batch of `index`."""
        with self._lock:
            before, self._one = self._one, iterator
            try:
                with replaced(iterator, {"_sampler_iter": iter([index])}):
                    yield
            finally:
                self._one = before

    def _catch_up(self, reading: _Reading, iterator: Any) -> None:
        """Its processes load ahead again, once what was left out, and may be looked at, is loaded."""
        if self._one is None:
            self._read_all()
        while reading.withheld:
            with self._loading(iterator, reading.withheld.popleft()):
                iterator._try_put_index()

    def _note(self, reading: _Reading, mark: str, data: Any) -> None:
        if self._at != (at := self._position()):
            self._at, self._newest = at, []
        content = ""
        try:
            if reading.structure is None:
                reading.structure = Structure(data)
            elif not reading.structure.fits(data):
                self._alike = False
            if reading.structure.is_known:
                content = " ".join(map(_mark_of, leaves(data)))
        except Exception:  # a batch may be of any type, and is the script's
            self._alike = False
        if len(self._newest) < _INDICES:
            self._newest.append([mark, content])


class _Fetcher:
    """Fetches as torch's does."""

    def __init__(self, of_torch: Any, loads: Loads) -> None:
        self.of_torch, self._loads = of_torch, loads
        self._after: list[Any] | None = None
        """What was there when it was looked last."""
        self._before: tuple[list[Any], list[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_torch, name)

    def fetch(self, index: Any) -> Any:
        """A batch."""
        return self._loads.fetch(self, index)

    def looks(self, index: Any) -> bool:
        """Look, before a batch is loaded. Returns whether all is as it was left."""
        now = _looked(lambda: look(self.of_torch, []))
        left, self._before = self._after, self._look(index)
        return now is not None and self._before is not None and left in (None, now)

    def is_same(self, index: Any) -> bool:
        """Look again, after it. Returns whether it is the same."""
        now, self._after = self._look(index), _looked(lambda: look(self.of_torch, []))
        return now is not None and now == self._before

    def _look(self, index: Any) -> tuple[list[Any], list[Any]] | None:
        return _looked(lambda: (look(self.of_torch, index), look_at_script()))


def _looked(looks: Callable[[], T]) -> T | None:
    try:
        return looks()
    except Exception:  # objects of the script's, and its threads, may do anything meanwhile
        return None


def _has_told(iterator: Any) -> bool:
    """Whether its processes, if it has any, load or have loaded what the script has yet to be given."""
    return type(iterator) is _MANY and bool(iterator._rcvd_idx < iterator._send_idx)


def _own(index: Any) -> Any:
    """A sampler may fill the same list again."""
    return list(index) if type(index) is list else index


def _mark_of_index(index: Any) -> str:
    """Equal of equal ones; empty where there is no telling."""
    if isinstance(index, (list, tuple, torch.Tensor, np.ndarray)) and np.ndim(index):
        index = [at.tolist() if isinstance(at, torch.Tensor) else at for at in index[:_INDICES]]
    try:
        return xxh3_64_hexdigest(repr(index).encode())
    except Exception:  # samplers may yield anything
        return ""


def _mark_of(leaf: torch.Tensor) -> str:
    few = leaf.detach()
    if few.dim():
        row = max(1, few.nbytes // max(1, few.shape[0]))
        few = few[: max(1, _BYTES // row)]
    data = few.contiguous().reshape(-1).view(torch.uint8)[:_BYTES]
    return f"{tuple(leaf.shape)} {xxh3_64_hexdigest(data.numpy().data)}"
