"""Operations of the start-up phase (see `startup`): issued at once, completed when they are waited for."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import distributed as dist

from ft_core.comm.collectives import FtProcessGroup
from ft_core.comm.entries import Entry
from ft_core.comm.startup_log import ENTRY_CAP, Call, describe, fill, mismatch, to_bytes
from ft_core.comm.works import FtWork
from ft_core.errors import EpochChanged, ReplayMismatch
from ft_core.process import stream
from ft_core.protocol.groups import Series

Issue = Callable[[int], FtWork | None]
"""Issues it in this epoch. Raises EpochChanged."""


class Startup(Protocol):
    """What an operation needs of the phase that it belongs to, see `startup.Startup`."""

    def peers_entry(self, series: Series, number: int, signature: str, epoch: int) -> Entry | None:
        """The entry of a survivor that had completed the operation; None if it must be executed."""

    def series_of(self, group: FtProcessGroup, pair: tuple[int, int] | None = None) -> Series:
        """The series of what is issued now. `pair`: ranks in the group."""

    def number(self, operation: Operation) -> int:
        """Which one of its series it is."""

    def where(self, series: Series, number: int) -> str:
        """An operation by its number, as error messages name it."""

    def speaks(self, tensors: list[torch.Tensor]) -> None:
        """This role is about to tell its peers something, these tensors among it."""

    def follows(self) -> None:
        """What this role does now was done before by a worker that is gone."""

    def check_any_source(self, whole: Series) -> None:
        """Raises ReplayMismatch where a peer's record has a message that is next here."""

    def record(self, epoch: int, series: Series, entry: Entry) -> bool:
        """Count the operation as completed, unless `epoch` is over."""

    def finish(self, operation: Operation, timeout: timedelta | None) -> None:
        """Complete it, over as many epochs as it takes."""

    def has_ended(self, operation: Operation) -> bool:
        """Whether `finish` would not wait."""


class Operation(ABC):
    """One operation, which is issued in one epoch after the other until it is completed. Main thread."""

    def __init__(self, startup: Startup, series: Series, issue: Issue, signature: str) -> None:
        self.series, self.signature = series, signature
        self.results: list[torch.Tensor] = []
        self.source = -1
        self.dropped = False
        """Whether nobody waits for it any more."""
        self.error: Exception | None = None
        """What it has failed with, for good."""
        self.work: FtWork | None = None
        self._startup, self._issue = startup, issue
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What executing it may overwrite, each with a copy."""
        self._entry: Entry | None = None
        self._epoch = -1

    def issue(self, epoch: int) -> None:
        """Issue it in this epoch, unless a peer's log has it, or that was done. Raises EpochChanged."""
        if self._epoch == epoch:
            return
        if self._epoch >= 0:
            self._take_back()
        self._entry = self._peers_entry(epoch)
        if self._entry is not None and self._epoch < 0 and self._needs_this_role:
            self._startup.follows()
        if self._entry is None:
            self._startup.speaks(self._given())
            self.work = self._issue(epoch)
        self._epoch = epoch
        if self.dropped:
            self.drop()

    def _take_back(self) -> None:
        """What was begun in an epoch that is over writes nothing any more, and has not been."""
        if self.work is not None:
            with contextlib.suppress(EpochChanged):
                self.work.wait()
            self.work = None
            stream.drain()
        with torch.no_grad():
            for tensor, copy in self._saved:
                tensor.copy_(copy)

    @property
    def has_ended(self) -> bool:
        """Whether there is the result, in the epoch that it was issued in."""
        return self._entry is not None or self.work is None or self.work.has_ended

    def is_completed(self) -> bool:
        """The same, for who asks until it has."""
        return self.has_ended or self.work is None or self.work.is_completed()

    @property
    def goes_on(self) -> bool:
        """Whether a wait that has failed has left it under way."""
        return self.work is not None and self.work.goes_on

    def attempt(self, timeout: timedelta | None) -> bool:
        """Wait for it in the epoch it was issued in. False if that epoch ended first."""
        if (entry := self._entry) is not None:
            self._apply(entry)
        else:
            try:
                if self.work is not None:
                    self.work.complete(timeout)
            except EpochChanged:
                return False
            entry = self._made()
        if not self._startup.record(self._epoch, self.series, entry):
            return False
        self.work, self._saved, self._entry = None, [], None
        return True

    def drop(self) -> None:
        """Nobody waits for it any more, but it goes on. Any thread, also the garbage collector."""
        self.dropped = True
        if (work := self.work) is not None:
            work.drop()

    def _peers_entry(self, epoch: int) -> Entry | None:
        return self._startup.peers_entry(self.series, self._startup.number(self), self.signature, epoch)

    def _where(self) -> str:
        return self._startup.where(self.series, self._startup.number(self))

    @property
    @abstractmethod
    def _needs_this_role(self) -> bool:
        """Whether no peer has completed it unless this role had issued it."""

    @abstractmethod
    def _given(self) -> list[torch.Tensor]:
        """What it tells peers."""

    @abstractmethod
    def _apply(self, entry: Entry) -> None:
        """Take the results from a peer's log. Raises ReplayMismatch."""

    @abstractmethod
    def _made(self) -> Entry:
        """What to record, now that it is done."""


class Collective(Operation):
    """One of the whole group."""

    def __init__(
        self, startup: Startup, series: Series, issue: Issue, call: Call, lenient: bool, weights: bool
    ) -> None:
        """`lenient` and `weights`: see `Call.apply`."""
        super().__init__(startup, series, issue, call.signature)
        self.results, self._saved = call.results, call.save()
        self._call, self._leniency = call, (lenient, weights)

    @property
    def _needs_this_role(self) -> bool:
        return self._call.needs_all or self._call.is_root

    def _given(self) -> list[torch.Tensor]:
        call = self._call
        return call.inputs if call.kind != "broadcast" or call.is_root else []

    def _apply(self, entry: Entry) -> None:
        self._call.apply(entry, self._where(), *self._leniency)

    def _made(self) -> Entry:
        return self._call.entry()


class Scatter(Collective):
    """A small scatter, in place of which all parts go to all, so that everybody has them on record."""

    @staticmethod
    def is_small(call: Call, members: int) -> bool:
        """Whether all parts together are kept on record. A larger one goes out as it is."""
        if [len(call.results), len(call.inputs)] != [1, members if call.is_root else 0]:
            return False  # torch refuses it
        [output] = call.results
        alike = all(part.shape == output.shape and part.dtype == output.dtype for part in call.inputs)
        return alike and output.nbytes * members <= ENTRY_CAP

    def __init__(
        self,
        startup: Startup,
        series: Series,
        broadcast: Callable[..., FtWork | None],
        call: Call,
        lenient: bool,
        weights: bool,
        rank: int,
        members: int,
    ) -> None:
        """`broadcast(arguments, keywords, epoch)` issues one in the group."""
        [output] = call.results
        with torch.no_grad():
            parts = torch.stack(call.inputs) if call.is_root else output.new_empty(members, *output.shape)
        options = dist.BroadcastOptions()
        assert call.root is not None
        options.rootRank = call.root
        arguments = [parts], options
        of_all = Call(rank, "broadcast", arguments, {})
        super().__init__(startup, series, partial(broadcast, arguments, {}), of_all, lenient, weights)
        self.results, self._part = [output], parts[rank]

    def attempt(self, timeout: timedelta | None) -> bool:
        """As `Operation.attempt` does; then this role's part goes where the script wants it."""
        if not super().attempt(timeout):
            return False
        with torch.no_grad():
            self.results[0].detach().copy_(self._part)
        return True


class PointToPoint(Operation):
    """A send or a receive."""

    def __init__(
        self, startup: Startup, series: Series, issue: Issue, tensors: list[torch.Tensor], source: int | None
    ) -> None:
        """`source`: of a receive, the rank in the group."""
        super().__init__(startup, series, issue, _sent_signature(tensors))
        self.results, self._receives = tensors, source is not None
        self.source = -1 if source is None else source

    @property
    def _needs_this_role(self) -> bool:
        return not self._receives  # others have received it

    def _given(self) -> list[torch.Tensor]:
        return [] if self._receives else self.results

    def _apply(self, entry: Entry) -> None:
        if entry.signature != self.signature:
            raise mismatch(self._where(), self.signature, entry.signature)
        if not self._receives:
            return
        if entry.tensors is None or [len(b) for b in entry.tensors] != [t.nbytes for t in self.results]:
            raise ReplayMismatch(
                f"{self._where()}: what was sent was too large for the start-up log; the job must fall back "
                "to its durable checkpoint"
            )
        for tensor, data in zip(self.results, entry.tensors, strict=True):
            fill(tensor, data)

    def _made(self) -> Entry:
        return _sent(self.signature, self.results)


class AnySource(Operation):
    """A receive from any source: of which series it is shows when it is done."""

    def __init__(
        self, startup: Startup, group: FtProcessGroup, issue: Issue, tensors: list[torch.Tensor]
    ) -> None:
        me = group.rank()
        self._of = lambda source: startup.series_of(group, (source, me))
        self._until_then = self._of(me)
        super().__init__(startup, self._until_then, issue, _sent_signature(tensors))
        self.results, self._whole = tensors, startup.series_of(group)

    def _peers_entry(self, epoch: int) -> Entry | None:
        self.series = self._until_then
        self._startup.check_any_source(self._whole)
        return None

    @property
    def _needs_this_role(self) -> bool:
        return False

    def _given(self) -> list[torch.Tensor]:
        return []

    def _apply(self, entry: Entry) -> None:
        raise AssertionError("whose message comes is on record nowhere")

    def _made(self) -> Entry:
        assert self.work is not None
        self.source = self.work.source_rank()
        self.series = self._of(self.source)
        return _sent(self.signature, self.results)


class StartupWork(dist.Work):
    """An operation of start-up as the script has it."""

    def __init__(self, startup: Startup, operation: Operation, on_stream: bool) -> None:
        """`on_stream`: the operation is ordered on a GPU's stream."""
        super().__init__()
        self._startup, self._operation, self._on_stream = startup, operation, on_stream

    def __del__(self) -> None:
        self._operation.drop()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, over as many epochs as it takes. Raises ReplayMismatch."""
        self._startup.finish(self._operation, timeout)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._startup.has_ended(self._operation)

    def is_success(self) -> bool:
        """Whether it is completed and has not failed."""
        return self._operation.error is None and self.is_completed()

    def exception(self) -> Any:
        """What it failed with."""
        return self._operation.error

    def synchronize(self) -> None:
        """Make the caller's stream wait for the result; nothing where there is none, as with gloo."""
        if self._on_stream:
            self.wait()

    def block_current_stream(self) -> None:
        """Same as `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._operation.results

    def source_rank(self) -> int:
        """Who sent what a receive got, as a rank in the group."""
        return self._operation.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that has its value: it is waited for here, as nobody could issue it again in a new epoch
        while the script waits in C++."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._operation.results)
        return future


def _sent_signature(tensors: list[torch.Tensor]) -> str:
    return f"send({', '.join(describe(tensors))})"


def _sent(signature: str, tensors: list[torch.Tensor]) -> Entry:
    kept = sum(t.nbytes for t in tensors) <= ENTRY_CAP
    return Entry("send", signature, tuple(map(to_bytes, tensors)) if kept else None)
