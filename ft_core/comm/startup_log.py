"""The start-up log: what each completed operation of the start-up phase was, and what came out of it.

An operation belongs to a series (see `protocol.groups`: the group or pair of roles that it is made in, and
where the phase goes on between training steps, the step) and has a number there. What is told of a log at an
epoch change (`StartupLog.counts`) must not grow with the steps: those that are over are told as one `Steps`
for each group or pair. Those that no newcomer asks for any more are dropped, see `startup`.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ft_core.comm.entries import Column, Entry, Kinds
from ft_core.errors import ReplayMismatch
from ft_core.protocol.groups import Ended, RecordCount, Series, Steps

log = logging.getLogger(__name__)

TOTAL_CAP = 64 << 20
"""Bytes of results that one process keeps; beyond it, entries keep their signature only."""

ENTRY_CAP = 1 << 20
"""Bytes above which a result is a parameter broadcast or the like: restore overwrites what it filled,
and it must not crowd out the small results that steer the script."""

AT_ONCE = 256 << 10
"""Bytes of results, and some for each operation, that a newcomer is given at a time: its peer is training."""

CountsByRole = Mapping[RecordCount, tuple[int, int]]
"""What roles have on record, as `StartupLog.counts`: the largest count, and a role that told it."""

_IN_PLACE = ("allreduce", "broadcast", "reduce")
_OVERHEAD = 256
_OWN_RESULT = ("reduce_scatter", "scatter", "alltoall")
"""A scatter among these is a large one: a small one goes out as `startup_works.Scatter`."""
_AT_ROOT = ("gather", "reduce")
_OF_ALL = ("allreduce", "allgather", "barrier")


class StartupLog:
    """Completed operations by series. The caller holds the lock that abort takes."""

    def __init__(self, total_cap: int = TOTAL_CAP, entry_cap: int = ENTRY_CAP) -> None:
        self._room, self._entry_cap = total_cap, entry_cap
        self._in_steps = 0
        """Bytes of results of steps."""
        self._startup: dict[Series, list[Entry]] = {}
        """The entries of no step."""
        self._open: dict[Series, list[Entry]] = {}
        """The entries of steps that are not over."""
        self._over: dict[Series, Column] = {}
        """The entries of steps that are; by series without a step."""
        self._kinds = Kinds()
        self._steps = (0, 0)

    def __len__(self) -> int:
        rows = [*self._startup.values(), *self._open.values()]
        return sum(map(len, rows)) + sum(map(len, self._over.values()))

    @property
    def is_full(self) -> bool:
        """Whether results of the next ones are soon kept no more, and those of steps have taken the room."""
        return self._room < self._entry_cap and self._in_steps > self._room

    def append(self, series: Series, entry: Entry) -> None:
        """Record the next operation of `series`."""
        if entry.nbytes > min(self._room, self._entry_cap):
            entry = Entry(entry.kind, entry.signature, None)
        self._room -= entry.nbytes
        if series.step is not None:
            self._in_steps += entry.nbytes
        entries = self._startup if series.step is None else self._open
        entries.setdefault(series, []).append(entry)

    def passed(self, first: int, until: int) -> None:
        """All operations of steps `first` to `until` - 1 that there are on this role are recorded."""
        self._steps = (first, until)
        over = [(s.step, s) for s in self._open if s.step is not None and s.step < until]
        for step, series in sorted(over, key=lambda found: found[0]):
            column = self._over.setdefault(series.at(None), Column(self._kinds))
            column.append(step, self._open.pop(series))

    def drop(self, until: int) -> None:
        """Forget all operations of steps before `until`, which are over."""
        freed = sum(column.drop(until) for column in self._over.values())
        self._room, self._in_steps = self._room + freed, self._in_steps - freed

    @property
    def series(self) -> Iterable[Series]:
        """Those that have operations on record, but for steps that are over."""
        return [*self._startup, *self._open]

    def count(self, series: Series) -> int:
        """Completed operations of `series`."""
        column = self._over.get(series.at(None)) if series.step is not None else None
        over = column.count(series.step) if column is not None and series.step is not None else 0
        return over or len(self._startup.get(series) or self._open.get(series) or ())

    def counts(self) -> dict[RecordCount, int]:
        """Completed operations by series, and steps that are over; merged by maximum."""
        first, until = self._steps
        over: dict[RecordCount, int] = {Steps(first, series): until for series in self._over}
        return over | {s: len(entries) for s, entries in [*self._startup.items(), *self._open.items()]}

    def entries(self, series: Series, start: int) -> dict[Series, list[Entry]]:
        """Entries of `series` from `start` on, and what was recorded after it, up to `AT_ONCE`.

        That is what a newcomer needs next: operations of a later step come up later.
        """
        found: dict[Series, list[Entry]] = {}
        if start >= self.count(series):
            return found
        left = AT_ONCE
        for each, entry in self._since(series, start):
            if left <= 0:
                break
            found.setdefault(each, []).append(entry)
            left -= _OVERHEAD + entry.nbytes
        return found

    def _since(self, series: Series, start: int) -> Iterator[tuple[Series, Entry]]:
        """What is on record from operation `start` of `series` on."""
        if series.step is None:
            yield from _since(self._startup, series, start)
        if series not in self._open:
            # Of one step the series itself comes first: what is asked for must be there.
            whole = sorted(self._over, key=lambda each: each.at(series.step) != series)
            yield from heapq.merge(*(self._of(each, series, start) for each in whole), key=_step)
        yield from _since(self._open, series, start)

    def _of(self, whole: Series, series: Series, start: int) -> Iterator[tuple[Series, Entry]]:
        step = series.step
        skipped = start if step is not None and whole.at(step) == series else 0
        for found, entry in self._over[whole].since(0 if step is None else step, skipped):
            yield whole.at(found), entry


def _since(
    entries: Mapping[Series, Sequence[Entry]], series: Series, start: int
) -> Iterator[tuple[Series, Entry]]:
    """From operation `start` of `series` on. All, if it is not among them: it comes before."""
    reached = series not in entries
    for each, found in entries.items():
        reached |= each == series
        for entry in found[start if each == series else 0 :] if reached else ():
            yield each, entry


def _step(found: tuple[Series, Entry]) -> int:
    assert found[0].step is not None
    return found[0].step


class Completed:
    """What survivors have on record, and which of them has it: their logs' `counts`, each with its role."""

    def __init__(self, found: CountsByRole) -> None:
        self._counts: dict[Series, tuple[int, int]] = {}
        self._steps: dict[Series, dict[int, tuple[int, int]]] = {}
        """By series without a step: from which step on -> how many are over, and a role that has them."""
        self._ended: set[Series] = set()
        self.learn(found)

    def learn(self, found: CountsByRole) -> None:
        """They have more by now."""
        for what, (count, role) in found.items():
            if isinstance(what, Ended):
                self._ended.add(what.series)
                continue
            if isinstance(what, Steps):
                known, key = self._steps.setdefault(what.series, {}), what.first
                known[key] = max(known.get(key, (0, -1)), (count, role), key=_first)
            else:
                self._counts[what] = max(self.count(what), (count, role), key=_first)

    def count(self, series: Series) -> tuple[int, int]:
        """Operations of this series on record, and a role whose log it is. Not of steps that are over."""
        return self._counts.get(series, (0, -1))

    def ended(self, series: Series) -> bool:
        """Whether somebody adds nothing to it any more."""
        return series in self._ended

    def counts(self) -> Iterator[tuple[Series, int, int]]:
        """(series, count, role)."""
        return ((series, *about) for series, about in self._counts.items())

    def holder(self, series: Series, number: int) -> int | None:
        """Who is past this operation, and has it on record if it did it; None if nobody is past it.

        Raises ReplayMismatch if their records begin later: it was dropped, or is lost with other workers.
        """
        count, role = self.count(series)
        if number < count:
            return role
        step = series.step
        if step is None:
            return None
        over = self._steps.get(series.at(None), {}).items()
        past = sorted((first, role) for first, (until, role) in over if step < until)
        if past and past[0][0] > step:
            raise ReplayMismatch(
                f"operation {number} of group {series} is on record nowhere: role {past[0][1]} is past it, "
                f"but its record begins at step {past[0][0]}. Either the workers that did it are lost, or "
                "this script begins at an earlier checkpoint than its newest (see its file `latest`)"
            )
        return past[0][1] if past else None

    def received(self, whole: Series, role: int) -> Iterator[Series]:
        """Series of what is sent to `role` in the group and step of `whole`, of which somebody may have
        operations on record."""
        over = (series.at(whole.step) for series in self._steps) if whole.step is not None else ()
        for series in {*self._counts, *over}:
            if series.pair is not None and series.pair[1] == role and replace(series, pair=None) == whole:
                yield series


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


class Call:
    """One operation's arguments, taken apart: results, inputs, signature."""

    def __init__(self, rank: int, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flat = [*args, *kwargs.values()]
        self.kind = kind
        first = tensors_in(flat[0]) if flat else []
        second = tensors_in(flat[1]) if len(flat) > 1 else []
        self.results = first
        self.inputs = first if kind in _IN_PLACE else second
        root = next((o.rootRank for o in flat if hasattr(o, "rootRank")), None)
        if root is None and kind in ("broadcast", "gather", "scatter", "reduce"):
            root = next((o for o in flat if isinstance(o, int)), 0)
        op = next((o.reduceOp for o in flat if hasattr(o, "reduceOp")), None)
        self.root, self.is_root = root, root == rank
        shown = self.inputs if kind == "gather" else self.results
        words = [str(op.op).rpartition(".")[2]] if op is not None else []
        words += [f"root {root}"] if root is not None else []
        words += describe(shown)
        self.signature = sys.intern(f"{kind}({', '.join(words)})")

    @property
    def replayable(self) -> bool:
        """Whether a peer's log can stand for this operation."""
        return self.kind not in _OWN_RESULT and not (self.kind in _AT_ROOT and self.is_root)

    @property
    def needs_all(self) -> bool:
        """Whether nobody has its result before all have come to it."""
        return self.kind in _OF_ALL

    def save(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the inputs that executing it may overwrite, each with its original."""
        places = set(map(_place, self.results))
        touched = (t for t in self.inputs if _place(t) in places)
        return [(t, t.detach().clone()) for t in touched] if self.kind != "broadcast" else []

    def without_peers(self) -> list[torch.Tensor]:
        """The results, which are zero where others would have sent them."""
        own = self.kind in ("send", "allreduce", "reduce") or (self.kind == "broadcast" and self.is_root)
        for tensor in () if own else self.results:
            tensor.detach().zero_()
        return self.results

    def entry(self) -> Entry:
        """What to record of it, with the bytes of the results that are the same on all members."""
        if self.kind in _OWN_RESULT + _AT_ROOT:
            return Entry(self.kind, self.signature, None)
        # A result that cannot be kept anyway is not copied.
        if any(map(_is_sparse, self.results)) or sum(t.nbytes for t in self.results) > ENTRY_CAP:
            return Entry(self.kind, self.signature, None)
        return Entry(self.kind, self.signature, tuple(to_bytes(t) for t in self.results))

    def apply(self, entry: Entry, where: str, lenient: bool = True, weights: bool = False) -> None:
        """Fill the results from a peer's entry. Raises ReplayMismatch.

        `lenient`: large results that were not kept may be left as they are, a restore fills them, if they are
        floating-point numbers or known to be `weights`, which some send as bytes.
        """
        if entry.signature != self.signature:
            raise mismatch(where, self.signature, entry.signature)
        # Parameters are restored later. Anything else steers the script and must not be made up.
        left = lenient and (weights or all(t.is_floating_point() for t in self.results))
        if not self.replayable and not (self.kind == "scatter" and left):
            raise ReplayMismatch(
                f"{where}: the result of {self.signature} existed on this role only, whose worker is lost"
            )
        if self.kind in _AT_ROOT:
            return
        if any(map(_is_sparse, self.results)):
            raise ReplayMismatch(
                f"{where}: the result of {self.signature} is sparse, which the start-up log does not keep"
            )
        if entry.tensors is None:
            if not left:
                raise ReplayMismatch(
                    f"{where}: the result of {self.signature} was too large for the start-up log"
                )
            log.info("%s: %s is left as it is, restore overwrites it", where, self.signature)
            return
        if [len(b) for b in entry.tensors] != [t.nbytes for t in self.results]:
            raise ReplayMismatch(f"{where}: the peer's entry for {self.signature} has another size")
        for tensor, data in zip(self.results, entry.tensors, strict=True):
            fill(tensor, data)


def describe(tensors: list[torch.Tensor]) -> list[str]:
    """Dtypes and shapes, for a signature."""
    sparse = {True: " sparse", False: ""}
    return [f"{str(t.dtype)[6:]}{list(t.shape)}{sparse[_is_sparse(t)]}" for t in tensors]


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor's content is; what it is where that is in several places."""
    return id(tensor) if _is_sparse(tensor) else tensor.untyped_storage().data_ptr()


def mismatch(where: str, issued: str, recorded: str) -> ReplayMismatch:
    """The script took another path than its peers did."""
    return ReplayMismatch(
        f"{where}: this process issues {issued}, its peers did {recorded}: the script is not deterministic "
        "up to here"
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested list, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return []


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's content, of any shape, device and type."""
    flat = tensor.detach().reshape(-1).clone().cpu()  # numpy would fix the size of the tensor's own storage
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fill(tensor: torch.Tensor, data: bytes) -> None:
    """Inverse of `to_bytes`; `data` must have the tensor's size."""
    if data:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensor.detach().copy_(source.view(tensor.dtype).reshape(tensor.shape))
