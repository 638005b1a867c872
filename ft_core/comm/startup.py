"""The start-up phase: every collective is recorded, so that a newcomer can replay instead of communicate.

For a group G and the sequence number s of an operation in it, the rule is:

    if any surviving member of G had completed (G, s) by the time of the epoch change, every member
    that has not takes its result from that member's log; otherwise it is executed for real.

It holds for a newcomer, which has completed nothing, as for a survivor that was blocked in the operation.
It works because the results of barrier, broadcast, all-reduce and all-gather are the same on all members.
What a role alone receives (reduce-scatter, all-to-all, gather and reduce at the root) cannot be replayed. A
small scatter, by which torch deals a DTensor out, goes to all as a whole instead: see `Scatter`. A
point-to-point operation counts in a series of its own, of group, source and destination; there the sender's
log holds what was sent.

A survivor does not unwind here: who waits for an operation waits for the next epoch, and issues all that are
under way again, in order. One is completed, and on record, once somebody has waited for it, and those of its
series that were issued before it; so what it may overwrite is kept until then. Whoever has not waited for one
that a peer has on record takes that, as a newcomer does.

Where a script is protected in place (`Session.begin`), the phase does not end: it is what the script
does between the framework's calls, for as long as it runs. The framework's own collectives are not
recorded (`paused`): its calls are done again as a whole. Before an operation is issued again in a new
epoch, `recover` brings the framework's state to where it was.

What newcomers may ask for is kept, and no more. Who asks is a survivor that is blocked in an operation, or a
newcomer, whose script is on its way from where it begins to where the others are. A script that begins at its
top needs the record of all steps, since what its collectives give it decides what it does. One that goes on
from its own newest checkpoint begins there: once that of step `s` is complete (`newcomers_begin_at`), and a
step after it is done on this role, so that every role has finished what it issued before `s`, and whoever had
begun at an older checkpoint has come to where the others are, the record of the steps before `s` is dropped.
A replica group that comes back is waited for by nobody while it is on its way, so from when it is announced
until it takes part nothing is dropped (`keep`). The only one that could miss a record is a survivor that left
a send or a receive of before `s` without a `wait` for more than a step; its error says so.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from ft_core.comm.collectives import Call as Coalesced
from ft_core.comm.collectives import FtProcessGroup, asynchronous
from ft_core.comm.entries import Entry
from ft_core.comm.startup_log import (
    Call,
    Completed,
    CountsByRole,
    StartupLog,
    mismatch,
    tensors_in,
)
from ft_core.comm.startup_works import AnySource, Collective, Operation, PointToPoint, Scatter, StartupWork
from ft_core.comm.works import CompletedWork, FtWork, Together
from ft_core.errors import EpochChanged, ReplayMismatch
from ft_core.protocol.groups import Ended, GroupId, RecordCount, Series

Fetch = Callable[[int, Series, int], Mapping[Series, Sequence[Entry]]]
"""(holder's role, series, first sequence number) -> see `StartupLog.entries`."""


class Communicators(Protocol):
    """What operations of this phase need of their process's communicators, see `process_group`."""

    role: int
    passed: Callable[[], None]

    @property
    def alive(self) -> bool:
        """Whether there is a live epoch."""

    def wait_live(self) -> int:
        """Block until there is a live epoch; return it."""

    def if_alive(self, epoch: int, action: Callable[[], None]) -> bool:
        """Run `action` unless `epoch` is over; no abort comes in between."""

    def issue(
        self,
        group: FtProcessGroup,
        method: str,
        kind: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        epoch: int | None = None,
    ) -> FtWork | None:
        """Issue an operation in `epoch`. Raises EpochChanged."""

    def failed(self, epoch: int, error: Exception) -> NoReturn:
        """Find out why something of `epoch` failed, and raise accordingly."""


class Startup:
    """Executes, records and replays the operations of the start-up phase (main thread)."""

    def __init__(self, comms: Communicators) -> None:
        self.log = StartupLog()
        self.recording = True
        self._step: int | None = None
        """How many steps the script has done; None until training."""
        self._section = ""
        self._muted = self._strict = self._weights = False
        self.rehearsing = False
        self.goes_by = ""
        """The first operation since `has_loaded` of which this script has its peers' result."""
        self._has_loaded = False
        self.tells: Callable[[], None] = lambda: None
        """Called before this role tells its peers something that no record answers."""
        self.gives: Callable[[list[torch.Tensor]], None] = lambda tensors: None
        """Called with what it tells them."""
        self.repeats: Callable[[], None] = lambda: None
        """Called before this role takes the result of what its worker before this one had issued as well."""
        self._comms = comms
        self._first: int | None = None
        """The step that the record begins with."""
        self._begin = 0
        """The step at which newcomers' scripts begin, or later."""
        self._keep = False
        self._completed = Completed({})
        self._fetch: Fetch | None = None
        self._fetched: dict[Series, tuple[int, list[Entry]]] = {}
        self._pending: list[Operation] = []
        """Operations under way, in the order in which they were issued."""
        self._ended: set[Series] = set()
        self._recover: Callable[[], None] | None = None

    def training_begins(self, recover: Callable[[], None]) -> None:
        """With the lock: training begins, and what is issued outside of `paused` is recorded further on."""
        self._recover, self._strict = recover, True

    def training_ends(self) -> None:
        """All roles have it behind them: an operation that is issued again finds no state to bring back."""
        self._recover = None

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
        before = self._section, self._muted
        self._section, self._muted = name, muted
        try:
            yield
        finally:
            self._section, self._muted = before

    @contextmanager
    def weights(self) -> Iterator[None]:
        """What is exchanged here is overwritten by a restore, of whatever type it is said to be."""
        self._weights = True
        try:
            yield
        finally:
            self._weights = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """What is exchanged here is used at once: no restore overwrites what is not on record."""
        was, self._strict = self._strict, True
        try:
            yield
        finally:
            self._strict = was

    def has_loaded(self) -> None:
        """In start-up the script has loaded a checkpoint: if its peers had begun with another, what they have
        on record there may be of another place in the script."""
        self._has_loaded = True

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
        self._step = step
        under_way = (operation.series.step for operation in self._pending)
        until = min([step, *(s for s in under_way if s is not None)])
        needed = min(self._begin, until)
        if self._first < needed and step > self._begin and not self._keep:
            self.log.drop(needed)
            self._first = needed
        if self.log.is_full and not self._keep and self._first < until - 1:
            self._first += (until - self._first) // 2
            self.log.drop(self._first)
        self.log.passed(self._first, until)

    def operations(self) -> dict[str, int]:
        """With the lock: how many there were in this step, by series without a step."""
        found = (s for s in self.log.series if s.step is not None and s.step == self._step)
        return {str(series.at(None)): self.log.count(series) for series in found}

    def were_done(self, operations: Mapping[str, int]) -> None:
        """This role's script is where another was when `operations` was called: they are on record here as
        they are there. Raises ReplayMismatch."""
        for text, many in operations.items():
            series = Series.parse(text).at(self._step)
            while (number := self.log.count(series)) < many:
                try:
                    epoch = self.live_epoch()
                    entry = self.peers_entry(series, number, "", epoch)
                    # Nobody has it: all roles begin anew here, and nobody asks for it.
                    self.record(
                        epoch, series, entry or Entry("skipped", "an operation of lost workers", None)
                    )
                except EpochChanged:
                    continue

    def newcomers_begin_at(self, step: int) -> None:
        """With the lock: the script's own checkpoint of that step is complete, and its newcomers load it."""
        self._begin = max(self._begin, step)

    def keep(self, wanted: bool) -> None:
        """With the lock: whether somebody may be on its way from an older checkpoint, until the next plan."""
        self._keep = wanted

    def live_epoch(self) -> int:
        """Block until there is a live epoch, in which the state is what it was; return it."""
        while self._recover is not None and not self._comms.alive:
            self._recover()
        return self._comms.wait_live()

    def plan(self, completed: CountsByRole, fetch: Fetch | None) -> None:
        """With the lock: what survivors had completed when this epoch began, and where to get it."""
        self._completed, self._fetch, self._fetched = Completed(completed), fetch, {}
        self._keep = False

    def learn(self, completed: CountsByRole) -> None:
        """With the lock: survivors have completed more."""
        self._completed.learn(completed)
        self._strict = True

    def counts(self) -> dict[RecordCount, int]:
        """With the lock: what the log tells, and a 1 for each series that gets no more."""
        return self.log.counts() | {Ended(series): 1 for series in self._ended}

    def series_of(self, group: FtProcessGroup, pair: tuple[int, int] | None = None) -> Series:
        """The series of what is issued now. `pair`: ranks in the group."""
        roles = None if pair is None else (group.members[pair[0]], group.members[pair[1]])
        return Series(group.identity, roles, None if self._section else self._step, self._section)

    def run(
        self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Issue one operation, which its work completes over as many epochs as it takes. Raises
        ReplayMismatch."""
        if self._muted:
            return CompletedWork(tensors_in(args), 0)
        if group.size() == 1:
            self.tells()
            if (alone := self._comms.issue(group, method, kind, args, kwargs)) is not None:
                alone.wait()
            return CompletedWork(tensors_in(args), 0)
        if self.rehearsing:
            return CompletedWork(Call(group.rank(), kind, args, kwargs).without_peers(), 0)
        operation = self._operation(group, method, kind, args, kwargs)
        self._pending.append(operation)
        try:
            self._issue()
            self._reap()
        except Exception:
            operation.dropped = True
            raise
        work = StartupWork(self, operation, asynchronous(group.devices))
        if method == "monitored_barrier":  # it has waited for all others
            work.wait()
        return work

    def _operation(
        self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Operation:
        # The epoch is pinned: in a newer one, peers may have completed the operation and not take part.
        issue = partial(self._comms.issue, group, method, kind, args, kwargs)
        if method == "recv_anysource":
            return AnySource(self, group, issue, tensors_in(args[0]))
        me = group.rank()
        if kind == "send":
            return PointToPoint(self, self.series_of(group, (me, args[1])), issue, tensors_in(args[0]), None)
        if kind == "recv":
            source = args[1]
            series = self.series_of(group, (source, me))
            return PointToPoint(self, series, issue, tensors_in(args[0]), source)
        # Once training has begun, no restore comes after this that overwrites large results.
        lenient = not self._strict
        call = Call(me, kind, args, kwargs)
        about = call, lenient, lenient and self._weights
        if kind == "scatter" and Scatter.is_small(call, group.size()):
            broadcast = partial(self._comms.issue, group, "broadcast", kind)
            return Scatter(self, self.series_of(group), broadcast, *about, me, group.size())
        return Collective(self, self.series_of(group), issue, *about)

    def run_together(self, group: FtProcessGroup, calls: list[Coalesced]) -> Together:
        """Complete operations that the script issues as one: one after the other, sends and receives in an
        order of all pairs, in which no two members wait for each other's."""
        me = group.rank()

        def place(call: Coalesced) -> tuple[int, ...]:
            if call.kind not in ("send", "recv"):
                return ()
            peer = call.args[1]
            return min(me, peer), max(me, peer), me if call.kind == "send" else peer

        return Together([self.run(group, *call) for call in sorted(calls, key=place)])

    def are_on_record(self, group: FtProcessGroup, many: int) -> bool:
        """Whether peers have completed so many of the next operations of this group."""
        if not self.recording or self._muted or self.rehearsing:
            return False
        series = self.series_of(group)
        under_way = sum(each.series == series for each in self._pending)
        return self._completed.holder(series, self.log.count(series) + under_way + many - 1) is not None

    def speaks(self, tensors: list[torch.Tensor]) -> None:
        """This role is about to tell its peers something, these tensors among it."""
        self.tells()
        if tensors:
            self.gives(tensors)

    def follows(self) -> None:
        """What this role does now was done before by a worker that is gone."""
        self.repeats()

    def record(self, epoch: int, series: Series, entry: Entry) -> bool:
        """Count the operation as completed, unless `epoch` is over: then its peers may not have."""
        return self._comms.if_alive(epoch, lambda: self.log.append(series, entry))

    def where(self, series: Series, number: int) -> str:
        """An operation by its number, as error messages name it."""
        return f"operation {number} of group {series}, role {self._comms.role}"

    def peers_entry(self, series: Series, number: int, signature: str, epoch: int) -> Entry | None:
        """The entry of a survivor that had completed the operation; None if it must be executed."""
        holder = self._completed.holder(series, number)
        if holder is None:
            if self._completed.ended(series):
                done = f"{self._completed.count(series)[0]} operations, then ended start-up"
                raise mismatch(self.where(series, number), signature, done)
            return None
        first, entries = self._fetched.get(series, (number, []))
        if not first <= number < first + len(entries):
            assert self._fetch is not None, "a plan with completed operations comes with `fetch`"
            try:
                found = self._fetch(holder, series, number)
            except Exception as error:
                self._comms.failed(epoch, error)
            for each, rows in found.items():
                self._fetched[each] = number if each == series else 0, list(rows)
            first, entries = self._fetched.get(series, (number, []))
            if not first <= number < first + len(entries):
                if not self._comms.if_alive(epoch, lambda: None):
                    raise EpochChanged(f"epoch {epoch} ended: role {holder} may have another worker by now")
                theirs = f"{number} operations (role {holder}) before they went on, or dropped their record"
                raise mismatch(self.where(series, number), signature, theirs)
        self._comms.passed()
        found_there = entries[number - first]
        if self._has_loaded and series.step is None and found_there.kind != "barrier":
            self.goes_by = self.goes_by or self.where(series, number)
        return found_there

    def check_any_source(self, whole: Series) -> None:
        """Raises ReplayMismatch where a peer's record has a message that is next here."""
        for series in self._completed.received(whole, self._comms.role):
            number = self.log.count(series)
            if self._completed.holder(series, number) is not None:
                raise ReplayMismatch(
                    f"{self.where(series, number)}: whose message comes next is not known for "
                    "a receive from any source"
                )

    def number(self, operation: Operation) -> int:
        """Which one of its series it is: they are completed in the order in which they were issued."""
        earlier = itertools.takewhile(lambda each: each is not operation, self._pending)
        return self.log.count(operation.series) + sum(each.series == operation.series for each in earlier)

    def _issue(self) -> None:
        """Issue what is pending, in order, in the live epoch, if that was not done. Raises EpochChanged in a
        call of the framework's, which is done again."""
        while True:
            if not (self.recording or self._comms.alive):
                raise EpochChanged(f"an epoch of role {self._comms.role} is over")
            epoch = self.live_epoch()
            try:
                for operation in list(self._pending):
                    try:
                        operation.issue(epoch)
                    except EpochChanged:
                        raise
                    except Exception as error:
                        self._fail(operation, error)
                        raise
                return
            except EpochChanged:
                continue

    def _fail(self, operation: Operation, error: Exception) -> None:
        operation.error = error
        self._pending.remove(operation)

    def finish(self, operation: Operation, timeout: timedelta | None = None) -> None:
        """Complete it, over as many epochs as it takes; earlier ones of its series first."""
        while operation in self._pending:
            self._issue()
            first = next(each for each in self._pending if each.series == operation.series)
            try:
                done = first.attempt(timeout)
            except Exception as error:
                if not first.goes_on:
                    self._fail(first, error)
                raise
            if done:
                self._pending.remove(first)
        if operation.error is not None:
            raise operation.error

    def has_ended(self, operation: Operation) -> bool:
        """Whether `finish` would not wait."""
        if operation not in self._pending:
            return True
        self._issue()
        return operation.is_completed()

    def _reap(self) -> None:
        """Complete what nobody waits for and has ended, unless something before it is under way."""
        waiting: set[Series] = set()
        for operation in list(self._pending):
            if operation.series in waiting or not (operation.dropped and operation.has_ended):
                waiting.add(operation.series)
                continue
            with contextlib.suppress(RuntimeError):  # nobody asks
                self.finish(operation)

    def complete(self) -> None:
        """Complete what has ended: start-up is about to."""
        for operation in list(self._pending):
            if operation.has_ended:
                self.finish(operation)

    def end(self, groups: Iterable[GroupId]) -> None:
        """With the lock: start-up is over. `groups`: those that there are.

        Raises ReplayMismatch if peers did more than this process.
        """
        if not self.recording:
            return
        for series, done, holder in self._completed.counts():
            if series.needs(self._comms.role) and self.log.count(series) < done:
                raise mismatch(
                    f"end of start-up on role {self._comms.role}",
                    f"{self.log.count(series)} operations in group {series}",
                    f"{done} (role {holder})",
                )
        self.recording = False
        self._ended = {*map(Series, groups), *self.log.series}
        self._completed, self._fetch, self._fetched = Completed({}), None, {}
