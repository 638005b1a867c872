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

Where a script is protected in place (`Session.begin`), the phase does not end: it is what the script
does between the framework's calls, for as long as it runs. The framework's own collectives are not
recorded (`paused`): its calls are done again as a whole. Before an operation is issued again in a new
epoch, `recover` brings the framework's state to where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ft_core.comm.collectives import FtProcessGroup, FtWork, members_of
from ft_core.comm.startup_log import (
    ENTRY_CAP,
    Call,
    Completed,
    Entry,
    StartupLog,
    describe,
    fill,
    mismatch,
    tensors_in,
    to_bytes,
)
from ft_core.errors import EpochChanged, ReplayMismatch

if TYPE_CHECKING:
    from ft_core.comm.process_group import Communicators

Fetch = Callable[[int, str, int], Mapping[str, Sequence[Mapping[str, Any]]]]
"""(holder's role, name in the log, first sequence number) -> see `StartupLog.to_json`."""

_END = "/end"
"""Suffix of a name in the plan: a peer ended start-up, the sequence grows no more."""


class DoneWork(dist.Work):
    """An operation that is complete."""

    def __init__(self, results: list[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._results, self._source = results, source

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

    def source_rank(self) -> int:
        """Of `recv_anysource`: who sent, as a rank in the group."""
        return self._source

    _source_rank = source_rank

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
        self._prefix, self._step = "", 0
        self._muted = self._strict = False
        self.rehearsing = False
        self._comms = comms
        self._first: int | None = None
        self._completed = Completed({})
        self._fetch: Fetch | None = None
        self._fetched: dict[str, tuple[int, list[Entry]]] = {}
        self._issued: Counter[str] = Counter()
        self._pending: list[PointToPoint] = []
        self._ended: list[str] = []
        self._recover: Callable[[], None] | None = None

    def go_on(self, recover: Callable[[], None]) -> None:
        """With the lock: training begins, and what is issued outside of `paused` is recorded further on."""
        self._recover, self._strict = recover, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collectives issued here are the framework's: not recorded, and aborted by an epoch change."""
        was, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = was

    @contextmanager
    def section(self, name: str, muted: bool) -> Iterator[None]:
        """Count operations issued here apart from all others, as a newcomer may have no use for them.

        `muted`: it has none, so nothing is communicated, and results stay as they are.
        """
        before = self._prefix, self._muted
        self._prefix, self._muted = f"{name}/", muted
        try:
            yield
        finally:
            self._prefix, self._muted = before

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What is issued here is done at once: there are no peers yet. They send zeros, as it were."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False

    def reached(self, step: int) -> None:
        """With the lock: the script has done `step` steps. Operations are counted from there, as a newcomer
        may begin at a later step than its predecessor did."""
        self._first = step if self._first is None else self._first
        if step != self._step:
            self._issued.clear()  # of names that do not come again
        self._step, self._prefix = step, f"{step}/"
        self.log.passed(self._first, min([step, *(work.step for work in self._pending)]))

    def live_epoch(self) -> int:
        """Block until there is a live epoch, in which the state is what it was; return it."""
        while self._recover is not None and not self._comms.alive:
            self._recover()
        return self._comms.wait_live()

    def plan(self, completed: Mapping[str, Any], fetch: Fetch | None) -> None:
        """With the lock: what survivors had completed when this epoch began, and where to get it."""
        self._completed, self._fetch, self._fetched = Completed(completed), fetch, {}

    def learn(self, completed: Mapping[str, Any]) -> None:
        """With the lock: survivors have completed more."""
        self._completed.learn(completed)
        self._strict = True

    def counts(self) -> dict[str, int]:
        """With the lock: what the log tells, and a 1 for each name that gets no more."""
        return self.log.counts() | {f"{name}{_END}": 1 for name in self._ended}

    def run(
        self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Complete one operation, over as many epochs as it takes. Raises ReplayMismatch."""
        if self._muted:
            return DoneWork(tensors_in(args), 0)
        if group.size() == 1:
            self._execute(group, method, kind, args, kwargs, None)
            return DoneWork(tensors_in(args), 0)
        if self.rehearsing:
            return DoneWork(Call(group.rank(), kind, args, kwargs).without_peers(), 0)
        if method == "recv_anysource":
            return self._any_source(group, args)
        if kind in ("send", "recv"):
            return self._point_to_point(group, method, args)
        call = Call(group.rank(), kind, args, kwargs)
        saved = call.save()
        name = self._prefix + group.ft_name
        number = self.log.count(name)
        while True:
            epoch = self.live_epoch()
            try:
                entry = self.peers_entry(name, number, call.signature, epoch)
                if entry is not None:
                    # Once training has begun, no restore comes after this that overwrites large results.
                    call.apply(entry, self.where(name, number), lenient=not self._strict)
                else:
                    self._execute(group, method, kind, args, kwargs, epoch)
                    entry = call.entry()
                if self.record(epoch, name, entry):
                    return DoneWork(call.results)
            except EpochChanged:
                pass
            for tensor, copy in saved:
                tensor.copy_(copy)

    def _execute(
        self,
        group: FtProcessGroup,
        method: str,
        kind: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        epoch: int | None,
    ) -> Any:
        # The epoch is pinned: in a newer one, peers may have completed the operation and not take part.
        work = self._comms.launch(self._comms.communicator(group, kind, epoch), method, args, kwargs)
        if work is not None:
            work.wait()
        return work

    def record(self, epoch: int, name: str, entry: Entry) -> bool:
        """Count the operation as completed, unless `epoch` is over: then its peers may not have."""
        return self._comms.if_alive(epoch, lambda: self.log.append(name, entry))

    def where(self, name: str, number: int) -> str:
        """For messages."""
        return f"operation {number} of group {name}, role {self._comms.role}"

    def peers_entry(self, name: str, number: int, signature: str, epoch: int) -> Entry | None:
        """The entry of a survivor that had completed the operation; None if it must be executed."""
        holder = self._completed.holder(name, number)
        if holder is None:
            if self._completed.count(f"{name}{_END}")[0]:
                done = f"{self._completed.count(name)[0]} operations, then ended start-up"
                raise mismatch(self.where(name, number), signature, done)
            return None
        first, entries = self._fetched.get(name, (number, []))
        if not first <= number < first + len(entries):
            assert self._fetch is not None, "a plan with completed operations comes with `fetch`"
            try:
                found = self._fetch(holder, name, number)
            except Exception as error:
                self._comms.failed(epoch, error)
            for each, rows in found.items():
                self._fetched[each] = number if each == name else 0, [Entry.from_json(e) for e in rows]
            first, entries = self._fetched.get(name, (number, []))
            if not first <= number < first + len(entries):
                if not self._comms.if_alive(epoch, lambda: None):
                    raise EpochChanged(f"epoch {epoch} ended: role {holder} may have another worker by now")
                theirs = f"{number} operations (role {holder}) before they went on"
                raise mismatch(self.where(name, number), signature, theirs)
        return entries[number - first]

    def _point_to_point(self, group: FtProcessGroup, method: str, args: tuple[Any, ...]) -> PointToPoint:
        peer, me = args[1], group.rank()
        name = self._prefix + (_pair(group, me, peer) if method == "send" else _pair(group, peer, me))
        work = PointToPoint(self, self._comms, group, self._step, name, self._issued[name], method, args)
        self._issued[name] += 1
        self._pending.append(work)
        try:
            work.issue()
        except EpochChanged:
            self.reissue()
        return work

    def _any_source(self, group: FtProcessGroup, args: tuple[Any, ...]) -> DoneWork:
        end = f">{group.rank()}"
        while True:
            epoch = self.live_epoch()
            for name in self._completed.pairs(f"{self._prefix}{group.ft_name}/", end):
                if self._completed.holder(name, self.log.count(name)) is not None:
                    raise ReplayMismatch(
                        f"{self.where(name, self.log.count(name))}: whose message comes next is not known "
                        "for a receive from any source; the job must fall back to its durable checkpoint"
                    )
            try:
                source = self._execute(group, "recv_anysource", "recv", args, {}, epoch).source_rank()
            except EpochChanged:
                continue
            tensors, name = tensors_in(args[0]), self._prefix + _pair(group, source, group.rank())
            if self.record(epoch, name, _sent(tensors)):
                self._issued[name] += 1
                return DoneWork(tensors, source)

    def reissue(self) -> None:
        """After an epoch change: issue what is pending again, in order."""
        while True:
            self.live_epoch()
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

    def end(self, groups: Mapping[str, int]) -> None:
        """With the lock: start-up is over. `groups`: name -> rank of this role in it.

        Raises ReplayMismatch if peers did more than this process.
        """
        if not self.recording:
            return
        for name, done, holder in (c for c in self._completed.counts() if not c[0].endswith(_END)):
            group, _, pair = name.partition("/")
            mine = (
                str(groups.get(group)) in pair.split(">") if pair else self._comms.role in members_of(group)
            )
            if mine and self.log.count(name) < done:
                raise mismatch(
                    f"end of start-up on role {self._comms.role}",
                    f"{self.log.count(name)} operations in group {name}",
                    f"{done} (role {holder})",
                )
        self.recording = False
        self._ended = sorted({*groups, *self.log.counts()})
        self._completed, self._fetch, self._fetched = Completed({}), None, {}


class PointToPoint(dist.Work):
    """A send or receive of the start-up phase: issued at once, completed in `wait`."""

    def __init__(
        self,
        startup: Startup,
        comms: Communicators,
        group: FtProcessGroup,
        step: int,
        name: str,
        number: int,
        method: str,
        args: tuple[Any, ...],
    ) -> None:
        super().__init__()
        self.step, self.name, self.number = step, name, number
        self._startup, self._comms, self._group = startup, comms, group
        self._method, self._args = method, args
        self._work: FtWork | None = None
        self._entry: Entry | None = None
        self._epoch = -1
        self._tensors = tensors_in(args[0])

    def issue(self) -> None:
        """Issue it in the current epoch, unless a peer's log has it. Raises EpochChanged."""
        epoch = self._startup.live_epoch()
        if self._epoch == epoch:
            return
        self._work = None
        self._entry = self._startup.peers_entry(self.name, self.number, _sent_signature(self._tensors), epoch)
        if self._entry is None:
            inner = self._comms.communicator(self._group, self._method, epoch)
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
            entry = _sent(self._tensors)
        elif entry.signature != _sent_signature(self._tensors):
            raise mismatch(where, _sent_signature(self._tensors), entry.signature)
        elif self._method == "recv":
            if entry.tensors is None or [len(b) for b in entry.tensors] != [t.nbytes for t in self._tensors]:
                raise ReplayMismatch(
                    f"{where}: what was sent was too large for the start-up log; the job must fall back to "
                    "its durable checkpoint"
                )
            for tensor, data in zip(self._tensors, entry.tensors, strict=True):
                fill(tensor, data)
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


def _pair(group: FtProcessGroup, source: int, target: int) -> str:
    return f"{group.ft_name}/{source}>{target}"


def _sent_signature(tensors: list[torch.Tensor]) -> str:
    return f"send({', '.join(describe(tensors))})"


def _sent(tensors: list[torch.Tensor]) -> Entry:
    kept = sum(t.nbytes for t in tensors) <= ENTRY_CAP
    return Entry("send", _sent_signature(tensors), tuple(map(to_bytes, tensors)) if kept else None)
