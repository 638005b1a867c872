"""The start-up phase: every collective is recorded, so that a newcomer can replay instead of communicate.

For a group G and the sequence number s of an operation in it, the rule is:

    if any surviving member of G had completed (G, s) by the time of the epoch change, every member
    that has not takes its result from that member's log; otherwise it is executed for real.

It holds for a newcomer, which has completed nothing, as for a survivor that was blocked in the operation.
It works because the results of barrier, broadcast, all-reduce and all-gather are the same on all members.
What a role alone receives (scatter, reduce-scatter, all-to-all, gather and reduce at the root) cannot
be replayed. A point-to-point operation counts in a sequence of its own, named after group, source and
destination; there the sender's log holds what was sent.

Operations of this phase are synchronous, because a survivor does not unwind here: it waits for the
next epoch and issues the operation again. Only point-to-point operations stay asynchronous, since a
send completes no earlier than its receive, and both directions may be under way.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ft_core.collectives import FtProcessGroup, FtWork, members_of
from ft_core.errors import EpochChanged, ReplayMismatch

if TYPE_CHECKING:
    from ft_core.process_group import Communicators

log = logging.getLogger(__name__)

Fetch = Callable[[int, str, int], Sequence[Mapping[str, Any]]]
"""(holder's role, name in the log, first sequence number) -> its entries from there, as JSON objects."""

TOTAL_CAP = 16 << 20
"""Bytes of results that one process keeps; beyond it, entries keep their signature only."""

ENTRY_CAP = 1 << 20
"""Bytes above which a result is a parameter broadcast or the like: restore overwrites what it filled,
and it must not crowd out the small results that steer the script."""

_IN_PLACE = ("allreduce", "broadcast", "reduce")
_OWN_RESULT = ("reduce_scatter", "scatter", "alltoall")
_AT_ROOT = ("gather", "reduce")
_END = "/end"


@dataclass(frozen=True)
class Entry:
    """A completed operation. `tensors`: the bytes of each result, or None where they are not kept."""

    kind: str
    signature: str
    tensors: tuple[bytes, ...] | None

    def to_json(self) -> dict[str, Any]:
        """For the control channel: tensors as base64."""
        kept = None if self.tensors is None else [base64.b64encode(t).decode() for t in self.tensors]
        return {"kind": self.kind, "signature": self.signature, "tensors": kept}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Inverse of `to_json`. Raises ReplayMismatch on anything else."""
        try:
            kept = data["tensors"]
            tensors = None if kept is None else tuple(base64.b64decode(t, validate=True) for t in kept)
            return cls(str(data["kind"]), str(data["signature"]), tensors)
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise ReplayMismatch(f"a peer's start-up log cannot be read: {error!r}") from error


class StartupLog:
    """Completed operations by name. The caller holds the lock that abort takes."""

    def __init__(self, total_cap: int = TOTAL_CAP, entry_cap: int = ENTRY_CAP) -> None:
        self._room, self._entry_cap = total_cap, entry_cap
        self._entries: dict[str, list[Entry]] = {}

    def append(self, name: str, entry: Entry) -> None:
        """Record the next operation of `name`."""
        if entry.tensors is not None:
            nbytes = sum(map(len, entry.tensors))
            if nbytes > min(self._room, self._entry_cap):
                entry = Entry(entry.kind, entry.signature, None)
            else:
                self._room -= nbytes
        self._entries.setdefault(name, []).append(entry)

    def count(self, name: str) -> int:
        """Completed operations of `name`."""
        return len(self._entries.get(name, ()))

    def counts(self) -> dict[str, int]:
        """Completed operations by name."""
        return {name: len(entries) for name, entries in self._entries.items()}

    def to_json(self, name: str, start: int) -> list[dict[str, Any]]:
        """Entries of `name` from `start` on."""
        return [e.to_json() for e in self._entries.get(name, ())[start:]]


class Call:
    """One operation's arguments, taken apart: results, inputs, signature."""

    def __init__(self, group: FtProcessGroup, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flat = [*args, *kwargs.values()]
        self.kind = kind
        first = _tensors(flat[0]) if flat else []
        second = _tensors(flat[1]) if len(flat) > 1 else []
        self.results = first
        self.inputs = first if kind in _IN_PLACE else second
        root = next((o.rootRank for o in flat if hasattr(o, "rootRank")), None)
        if root is None and kind in ("broadcast", "gather", "scatter", "reduce"):
            root = next((o for o in flat if isinstance(o, int)), 0)
        op = next((o.reduceOp for o in flat if hasattr(o, "reduceOp")), None)
        self.is_root = root == group.rank()
        shown = self.inputs if kind == "gather" else self.results
        words = [str(op.op).rpartition(".")[2]] if op is not None else []
        words += [f"root {root}"] if root is not None else []
        words += [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in shown]
        self.signature = f"{kind}({', '.join(words)})"

    @property
    def replayable(self) -> bool:
        """Whether a peer's log can stand for this operation."""
        return self.kind not in _OWN_RESULT and not (self.kind in _AT_ROOT and self.is_root)

    def save(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the inputs that executing it may overwrite, each with its original."""
        places = {t.untyped_storage().data_ptr() for t in self.results}
        touched = (t for t in self.inputs if t.untyped_storage().data_ptr() in places)
        return [(t, t.detach().clone()) for t in touched] if self.kind != "broadcast" else []

    def entry(self) -> Entry:
        """What to record of it, with the bytes of the results that are the same on all members."""
        if self.kind in _OWN_RESULT + _AT_ROOT:
            return Entry(self.kind, self.signature, None)
        # A result that cannot be kept anyway is not copied.
        if sum(t.nbytes for t in self.results) > ENTRY_CAP:
            return Entry(self.kind, self.signature, None)
        return Entry(self.kind, self.signature, tuple(_to_bytes(t) for t in self.results))

    def apply(self, entry: Entry, where: str) -> None:
        """Fill the results from a peer's entry. Raises ReplayMismatch."""
        if entry.signature != self.signature:
            raise ReplayMismatch(f"{where}: this process issues {self.signature}, its peer did {entry.signature}")
        if not self.replayable:
            raise ReplayMismatch(
                f"{where}: the result of {self.signature} existed on this role only and is lost with its "
                "worker; the job must fall back to its durable checkpoint"
            )
        if self.kind in _AT_ROOT:
            return
        if entry.tensors is None:
            # Parameters are restored later. Anything else steers the script and must not be made up.
            if any(not t.is_floating_point() for t in self.results):
                raise ReplayMismatch(
                    f"{where}: the result of {self.signature} was too large for the start-up log; the job "
                    "must fall back to its durable checkpoint"
                )
            log.info("%s: %s is left as it is, restore overwrites it", where, self.signature)
            return
        if [len(b) for b in entry.tensors] != [t.nbytes for t in self.results]:
            raise ReplayMismatch(f"{where}: the peer's entry for {self.signature} has another size")
        for tensor, data in zip(self.results, entry.tensors, strict=True):
            _fill(tensor, data)


class DoneWork(dist.Work):
    """An operation that is complete."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that has its value."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


class Startup:
    """Executes, records and replays the operations of the start-up phase (main thread)."""

    def __init__(self, comms: Communicators) -> None:
        self.log = StartupLog()
        self.recording = True
        self._comms = comms
        self._completed: Mapping[str, Any] = {}
        self._fetch: Fetch | None = None
        self._fetched: dict[str, tuple[int, list[Entry]]] = {}
        self._issued: Counter[str] = Counter()
        self._pending: list[PointToPoint] = []
        self._ended: list[str] = []

    def plan(self, completed: Mapping[str, Any], fetch: Fetch | None) -> None:
        """With the lock: what survivors had completed when this epoch began, and where to get it."""
        self._completed, self._fetch, self._fetched = completed, fetch, {}

    def counts(self) -> dict[str, int]:
        """With the lock: completed operations by name; and a 1 for each name that gets no more."""
        return self.log.counts() | {f"{name}{_END}": 1 for name in self._ended}

    def run(self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Complete one operation, over as many epochs as it takes. Raises ReplayMismatch."""
        if group.size() > 1 and kind in ("send", "recv"):
            return self._point_to_point(group, method, kind, args)
        call = Call(group, kind, args, kwargs)
        if group.size() == 1:
            self._execute(group, method, kind, args, kwargs)
            return DoneWork(call.results)
        saved = call.save()
        while True:
            epoch = self._comms.wait_live()
            try:
                entry = self.peers_entry(group.ft_name, self.log.count(group.ft_name), call.signature, epoch)
                if entry is not None:
                    call.apply(entry, self.where(group.ft_name, self.log.count(group.ft_name)))
                else:
                    self._execute(group, method, kind, args, kwargs)
                    entry = call.entry()
            except EpochChanged:
                entry = None
            if entry is not None and self.record(epoch, group.ft_name, entry):
                return DoneWork(call.results)
            for tensor, copy in saved:
                tensor.copy_(copy)

    def _execute(
        self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        work = self._comms.launch(self._comms.communicator(group, kind), method, args, kwargs)
        if work is not None:
            work.wait()

    def record(self, epoch: int, name: str, entry: Entry) -> bool:
        """Count the operation as completed, unless `epoch` is over: then its peers may not have."""
        return self._comms.if_alive(epoch, lambda: self.log.append(name, entry))

    def where(self, name: str, number: int) -> str:
        """For messages."""
        return f"start-up operation {number} of group {name}, role {self._comms.role}"

    def peers_entry(self, name: str, number: int, signature: str, epoch: int) -> Entry | None:
        """The entry of a survivor that had completed the operation; None if it must be executed."""
        done, holder = self._completed.get(name, (0, -1))
        if number >= done:
            if self._completed.get(f"{name}{_END}") and holder != self._comms.role:
                raise ReplayMismatch(
                    f"{self.where(name, number)}: this process issues {signature}, but its peers ended start-up "
                    f"after {done} operations; the job must fall back to its durable checkpoint"
                )
            return None
        first, entries = self._fetched.get(name, (number, []))
        if not first <= number < first + len(entries):
            assert self._fetch is not None, "a plan with completed operations comes with `fetch`"
            try:
                found = self._fetch(holder, name, number)
            except Exception as error:
                self._comms.failed(epoch, error)
            entries = [Entry.from_json(e) for e in found]
            first = number
            self._fetched[name] = first, entries
            if not entries:
                raise ReplayMismatch(f"{self.where(name, number)}: role {holder} has no record of it")
        return entries[number - first]

    def _point_to_point(self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...]) -> Any:
        if method == "recv_anysource":
            # Whose turn it is cannot be known from a log.
            raise ReplayMismatch(
                f"role {self._comms.role} receives from any source in group {group.ft_name} during start-up, which "
                "a newcomer could not replay: name the source, or do it in the training section"
            )
        tensors, peer, _ = args
        source, target = (group.rank(), peer) if kind == "send" else (peer, group.rank())
        name = f"{group.ft_name}/{source}>{target}"
        work = PointToPoint(self, self._comms, group, name, self._issued[name], method, args)
        self._issued[name] += 1
        self._pending.append(work)
        try:
            work.issue()
        except EpochChanged:
            self.reissue()
        return work

    def reissue(self) -> None:
        """After an epoch change: issue what is pending again, in order."""
        while True:
            self._comms.wait_live()
            try:
                for work in self._pending:
                    work.issue()
                return
            except EpochChanged:
                continue

    def finish(self, work: PointToPoint) -> None:
        """It is complete; earlier ones of the same sequence are completed first."""
        for earlier in [w for w in self._pending if w.name == work.name and w.number < work.number]:
            earlier.wait()
        while work in self._pending:
            if work.attempt():
                self._pending.remove(work)
            else:
                self.reissue()

    def end(self, groups: list[str]) -> None:
        """With the lock: start-up is over. Raises ReplayMismatch if peers did more of it than this process."""
        if not self.recording:
            return
        for name, (done, holder) in ((n, v) for n, v in self._completed.items() if not n.endswith(_END)):
            mine = self._comms.role in members_of(name) and ">" not in name
            if mine and self.log.count(name) < done:
                raise ReplayMismatch(
                    f"role {self._comms.role} ended start-up after {self.log.count(name)} operations of group {name}, "
                    f"role {holder} did {done}: the script took another path; the job must fall back to its "
                    "durable checkpoint"
                )
        self.recording = False
        self._ended = sorted({*groups, *self.log.counts()})
        self._completed, self._fetch, self._fetched = {}, None, {}


class PointToPoint(dist.Work):
    """A send or receive of the start-up phase: issued at once, completed in `wait`."""

    def __init__(
        self,
        startup: Startup,
        comms: Communicators,
        group: FtProcessGroup,
        name: str,
        number: int,
        method: str,
        args: tuple[Any, ...],
    ) -> None:
        super().__init__()
        self.name, self.number = name, number
        self._startup, self._comms, self._group, self._method, self._args = startup, comms, group, method, args
        self._work: FtWork | None = None
        self._entry: Entry | None = None
        self._epoch = -1
        tensors = _tensors(args[0])
        words = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        self._tensors, self._signature = tensors, f"send({words})"

    def issue(self) -> None:
        """Issue it in the current epoch, or find that it needs no communication there. Raises EpochChanged."""
        epoch = self._comms.wait_live()
        if self._epoch == epoch:
            return
        self._work = None
        self._entry = self._startup.peers_entry(self.name, self.number, self._signature, epoch)
        if self._entry is None:
            inner = self._comms.communicator(self._group, self._method)
            self._work = self._comms.launch(inner, self._method, self._args, {})
        self._epoch = epoch

    def attempt(self) -> bool:
        """Wait for it in the epoch it was issued in. False if that epoch ended first."""
        where = self._startup.where(self.name, self.number)
        entry = self._entry
        if entry is None:
            try:
                if self._work is not None:
                    self._work.wait()
            except EpochChanged:
                return False
            small = sum(t.nbytes for t in self._tensors) <= ENTRY_CAP
            entry = Entry("send", self._signature, tuple(map(_to_bytes, self._tensors)) if small else None)
        elif entry.signature != self._signature:
            raise ReplayMismatch(f"{where}: this process issues {self._signature}, its peer did {entry.signature}")
        elif self._method == "recv":
            if entry.tensors is None or [len(b) for b in entry.tensors] != [t.nbytes for t in self._tensors]:
                raise ReplayMismatch(
                    f"{where}: what was sent is too large for the start-up log; the job must fall back to its "
                    "durable checkpoint"
                )
            for tensor, data in zip(self._tensors, entry.tensors, strict=True):
                _fill(tensor, data)
        return self._startup.record(self._epoch, self.name, entry)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, over as many epochs as it takes. Raises ReplayMismatch."""
        self._startup.finish(self)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


def _to_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _fill(tensor: torch.Tensor, data: bytes) -> None:
    if data:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensor.detach().copy_(source.view(tensor.dtype).reshape(tensor.shape))
