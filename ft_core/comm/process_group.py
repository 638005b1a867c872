"""The `ft` backend: process groups that are repaired in place when the job moves to a new epoch.

`Communicators` is the registry of a worker's groups and all that the session talks to:

    comms = Communicators(role, world_size, on_failure=report)
    backend.install(comms)                # init_process_group and new_group now make `ft` groups
    comms.swap(epoch, "host:port", ...)   # a plan arrived: communicators of this epoch may open
    comms.abort(epoch)                    # watcher thread: epochs below this one are over
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ft_core.comm.apart import LOOK, apart
from ft_core.comm.collectives import COLLECTIVES, Call, FtProcessGroup
from ft_core.comm.flight import FlightRecorder
from ft_core.comm.inner import Inner, Opener, Pair, device_of_thread, likely_device, start
from ft_core.comm.partial import Partial
from ft_core.comm.startup import Fetch, Startup
from ft_core.comm.startup_log import CountsByRole
from ft_core.comm.store import SharedStore
from ft_core.comm.watchdog import InFlight, Watchdog
from ft_core.comm.works import (
    ApartWork,
    FtWork,
    Promise,
    as_here,
    is_mistake,
    is_the_scripts,
    is_timeout,
    is_transport_error,
)
from ft_core.errors import EpochChanged, FtError
from ft_core.process import stream
from ft_core.protocol.groups import GroupId, RecordCount, Series
from ft_core.protocol.messages import StartupEntry

log = logging.getLogger(__name__)

OPENERS = 4
"""How many communicators are re-opened at once after a swap."""

ABORTS = 15.0
"""Seconds that the opening of a communicator waits for old ones to be aborted: their memory and the
device's attention are its own then."""

OPENED = 60.0
"""Seconds in which members that have met are connected; NCCL takes some 14 s for 32,768 of them (FFTrainer,
7.4)."""

UNWAITED = 256
"""Operations of a communicator that are queued on a device at most before one of them was waited for: its
queue takes a thousand, and who finds it full may wait with Python's lock for what only an abort ends."""
QUEUED = 0.001
"""Seconds between two looks whether one of them has ended."""

_LOOK = 0.1
CLOSE_TIMEOUT = 5.0
"""Seconds that destroying a group waits for its operations to end."""

_UNWATCHED = nullcontext()
_POINT_TO_POINT = ("send", "recv")
_APART = (*_POINT_TO_POINT, "reduce_scatter")
"""Operations of gloo whose wait cannot be given a short limit. That of torch's reduce-scatter ignores it."""


class Communicators:
    """All process groups of the worker that plays `role`, in creation order.

    `on_failure(reason)` is called once per epoch, from the thread whose operation failed, when a
    communicator fails before the watcher heard of a new epoch; with True beside it where a link has.
    `failure_grace` is how long (seconds) such an operation then waits for the new epoch before the original
    error is raised after all. `secret` is the job's.
    """

    def __init__(
        self,
        role: int,
        world_size: int,
        on_failure: Callable[..., None],
        secret: bytes,
        failure_grace: float = 30.0,
        flight: memoryview | None = None,
    ) -> None:
        self._secret = secret
        self.role, self.world_size = role, world_size
        self.traffic: Callable[[int], None] | None = None
        """Called with the number of operations in flight when it becomes 1 or 0. Must be cheap."""
        self.hung: Callable[[str, bool], None] = lambda reason, by_link: None
        """Called with the reason when an operation on a GPU takes longer than its group's limit (False), or
        when its link fails (True)."""
        self.passed: Callable[[], None] = lambda: None
        """Called whenever an operation of start-up was taken from the record. Must be cheap."""
        self.reopened: Callable[[int], None] | None = None
        """Called once per epoch, when the groups that were in use before it are connected again."""
        self.flight = FlightRecorder(role, flight)
        self.counts: Counter[str] = Counter()
        """Collectives issued, by kind (the values of `collectives.COLLECTIVES`)."""
        self.epoch = -1
        self.aborted = 0
        """Epochs below this one are over."""
        self.startup = Startup(self)
        self.shared = SharedStore(self)
        self._on_failure, self._grace = on_failure, failure_grace
        self._condition = threading.Condition()
        self._groups: list[FtProcessGroup] = []
        self._created: Counter[tuple[int, ...]] = Counter()
        self._absent: Mapping[int, int] = {}
        self._adopted = self._apart = False
        self._aborts: list[threading.Thread] = []
        self.lacked_memory = False
        """Whether the device had no room for a communicator: what torch keeps of its memory may be it."""
        self._device: int | None = None
        """What this process works on, as far as is known."""
        self._promises: set[Promise] = set()
        """Results that somebody may wait for, whatever becomes of the operation."""
        self._opener = Opener(-1, "", b"", role, lambda: False, lambda group: None)
        self._asked: set[GroupId] = set()
        self._to_reopen: list[FtProcessGroup] = []
        self._reported = self._announced = -1
        self._in_flight, self._generation = 0, 0
        self._watchdog = Watchdog()
        self._ahead = stream.RunAhead()
        self._traffic_lock = threading.RLock()  # the garbage collector may end an operation inside

    # -- epochs -----------------------------------------------------------------------------------

    def swap(
        self,
        epoch: int,
        store_address: str,
        completed: CountsByRole | None = None,
        fetch: Fetch | None = None,
        absent: Mapping[int, int] | None = None,
        adopted: bool = False,
        newcomers: Collection[int] = (),
    ) -> None:
        """Begin `epoch`. Any thread; returns at once.

        `absent` roles take no part; each with its counterpart, which has `adopted` its state or has the same
        anyway: see `partial`. `newcomers`: roles that have other workers than before.

        `store_address` ("host:port") is where this epoch's store is (`rendezvous_server`); empty where this
        role meets nobody, since another worker plays it. `completed` and `fetch` serve operations of the
        start-up phase, see `startup`. Ignored when a newer epoch was already announced.
        """
        with self._condition:
            if epoch <= self.epoch or epoch < self.aborted:
                return
            old, _ = self._end_epochs(epoch)
            self._opener.close()
            alive = lambda: epoch >= self.aborted  # noqa: E731
            all_new = not newcomers or not set(range(self.world_size)) - {*newcomers, *(absent or ())}
            self.shared.counts = self.epoch == -1 and all_new
            about = (self.role, alive, self._on_asked, newcomers, partial(self.shared.joins, epoch))
            opener = Opener(epoch, store_address, self._secret, *about)
            self.epoch, self._opener = epoch, opener
            self.flight.begins(epoch)
            self._absent, self._adopted = dict(absent or {}), adopted
            self._apart = not store_address
            self._asked.clear()
            self.startup.plan(completed or {}, fetch)
            self._to_reopen = [g for g in self._groups if g.used]
            reopen, many = iter(self._to_reopen), len(self._to_reopen)
            self._condition.notify_all()
        if old:
            start("reaper", _close, old)
        if self.world_size > 1 and store_address:
            start("listener", opener.listen)
        for _ in range(min(OPENERS, many)):
            start("reopen", self._reopen, epoch, reopen)

    def abort(self, epoch: int) -> None:
        """Epochs below `epoch` are over: whatever is blocked in them, or issued from now on, raises
        EpochChanged within milliseconds. Any thread; never touches a communicator of `epoch` or later."""
        with self._condition:
            if epoch <= self.aborted:
                return
            self._end_epochs(epoch)
            if self._opener.epoch < epoch:
                self._opener.close()
            self._condition.notify_all()

    def _end_epochs(self, epoch: int) -> tuple[list[Inner], list[Inner]]:
        """With the lock: mark epochs below `epoch` dead, wake their operations. Returns what to close."""
        woken, dead = [], []
        for group in self._groups:
            inner = group.inner
            if inner is None or inner.size == 1 or inner.epoch >= epoch:
                continue
            for each in (inner, *inner.pairs.values()):
                if each.ready:
                    dead.append(each)
                    if each.epoch >= self.aborted:
                        woken.append(each)
        self.aborted = max(self.aborted, epoch)
        self._aborts = [thread for thread in self._aborts if thread.is_alive()]
        self._aborts += [start("wake", inner.wake) for inner in woken]
        if self._promises:
            start("promises", self._break)
        return dead, woken

    def reset(self) -> None:
        """After an epoch change, main thread: forget half-coalesced operations and what was in flight."""
        c10d._world.pg_coalesce_state.clear()
        for group in self._groups:
            group.coalesced = None
        with self._traffic_lock:
            self._generation += 1
            busy, self._in_flight = self._in_flight > 0, 0
            if busy and self.traffic is not None:
                self.traffic(0)

    def is_own(self, inner: Inner, error: Exception, began: float, limit: timedelta | None) -> bool:
        """Whether the script itself is why an operation of gloo's that `began` then (time.monotonic) has
        failed, and no lost peer: it has set so short a time, or has asked for what gloo does not do.

        `limit`: the time that it has set for this operation. One that it has set for the whole group counts
        where it is shorter than we would wait for a new epoch.
        """
        if inner.asynchronous:
            return False
        if limit is None and inner.timeout.total_seconds() < self._grace:
            limit = inner.timeout
        took = time.monotonic() - began
        if limit is not None and took >= limit.total_seconds() and is_timeout(error):
            inner.timed_out = True
        return inner.timed_out or is_mistake(error)

    def failed(self, epoch: int, error: Exception, own: bool = False, by_link: bool = False) -> NoReturn:
        """An operation of `epoch` failed with `error`: find out why, and raise accordingly.

        Raises EpochChanged if the epoch is over, or ends within the grace period; else `error`. That at once
        where it is the script's own (`is_own`, or out of its code).
        """
        if is_the_scripts(error) or (own and epoch >= self.aborted):
            raise error
        with self._condition:
            first = epoch >= self.aborted and self._reported < epoch
            if first:
                self._reported = epoch
        if first:
            beside = (True,) if by_link else ()
            self._on_failure(f"{type(error).__name__}: {error}", *beside)
        with self._condition:
            if not self._condition.wait_for(lambda: epoch < self.aborted, self._grace):
                raise error
        raise EpochChanged(f"epoch {epoch} ended during a collective of role {self.role}") from error

    @property
    def alive(self) -> bool:
        """Whether there is a live epoch."""
        return self.epoch >= self.aborted

    def wait_live(self) -> int:
        """Block until there is a live epoch; return it."""
        with self._condition:
            self._condition.wait_for(lambda: self.epoch >= self.aborted)
            return self.epoch

    def script_epoch(self) -> int:
        """The live epoch, waited for where the script does so in an operation. Raises EpochChanged."""
        if threading.current_thread() is not threading.main_thread():
            return self.wait_live()
        if self.startup.recording:
            return self.startup.live_epoch()
        if not self.alive:
            raise EpochChanged(f"epoch {self.epoch} is over; role {self.role} goes on in the next")
        return self.epoch

    def wait_for(self, predicate: Callable[[], bool], epoch: int) -> None:
        """Block until `predicate` or the end of `epoch`. Whoever makes it true notifies."""
        with self._condition:
            self._condition.wait_for(lambda: predicate() or epoch < self.aborted)

    def promise(self, promise: Promise) -> None:
        """It fails soon after the end of its epoch, whatever becomes of the operation."""
        with self._condition:
            self._promises.add(promise)
            if promise.epoch < self.aborted:
                start("promises", self._break)

    def settled(self, promise: Promise) -> None:
        """That it does not need any more."""
        with self._condition:
            self._promises.discard(promise)

    def _break(self) -> None:
        """Fail those of epochs that are over, after a moment in which their operations may end."""
        time.sleep(LOOK)
        with self._condition:
            broken = {promise for promise in self._promises if promise.epoch < self.aborted}
            self._promises -= broken
        for promise in broken:
            promise.fail(EpochChanged(f"epoch {promise.epoch} ended during a collective of role {self.role}"))

    def if_alive(self, epoch: int, action: Callable[[], None]) -> bool:
        """Run `action` unless `epoch` is over; no abort comes in between."""
        with self._condition:
            if epoch < self.aborted:
                return False
            action()
            return True

    # -- communicators ----------------------------------------------------------------------------

    def communicator(self, group: FtProcessGroup, kind: str, epoch: int | None = None) -> Inner:
        """The group's communicator in the current epoch, opened if need be. Blocks until it is open.

        Raises EpochChanged if there is no live epoch, if it is not `epoch` or if it ends, and otherwise
        what the opening failed with.
        """
        with self._condition:
            if group.destroyed:
                raise ValueError(f"process group {group.identity} was destroyed")
            if group.size() == 1:
                return self._local(group)
            if self.epoch < self.aborted or epoch not in (None, self.epoch):
                raise EpochChanged(
                    f"epoch {epoch or self.epoch} is over; role {self.role} goes on in the next"
                )
            if self._apart:
                raise FtError(
                    f"role {self.role} is played by another worker, which has no record of what this one "
                    f"would do in group {group.identity}"
                )
            # What only start-up needs is not opened again in later epochs.
            group.used |= not self.startup.recording
            group.p2p_used |= kind in _POINT_TO_POINT and group.size() > 2
            if (device := device_of_thread(group.devices)) is not None:
                group.device = self._device = device
            inner, fresh = self._claim(group)
            inner.wanted |= kind not in _POINT_TO_POINT
            opener = self._opener
        if fresh:
            start("open", self._open, inner, opener, group.p2p_used)
        self._wait_open(inner)
        return inner

    def _pair(self, of: Inner, peer: int) -> Inner:
        """The communicator of this member of a group with another, opened if need be. As `communicator`."""
        with self._condition:
            pair, fresh = self._claim_pair(of, peer)
            opener = self._opener
        if fresh:
            start("open", self._open, pair, opener, True)
        self._wait_open(pair)
        return pair

    def _claim_pair(self, of: Inner, peer: int) -> tuple[Inner, bool]:
        """With the lock: as `_claim`."""
        fresh = peer not in of.pairs
        if fresh:
            of.pairs[peer] = Pair(of, peer)
        return of.pairs[peer], fresh

    def _wait_open(self, inner: Inner) -> None:
        self.wait_for(lambda: inner.ready or inner.error is not None, inner.epoch)
        if inner.error is not None:
            self.failed(inner.epoch, inner.error)
        if inner.epoch < self.aborted:
            raise EpochChanged(f"epoch {inner.epoch} ended while role {self.role} opened {inner.meeting}")

    def _claim(self, group: FtProcessGroup) -> tuple[Inner, bool]:
        """With the lock: the current epoch's inner communicator, and whether the caller must open it."""
        if group.inner is not None and group.inner.epoch == self.epoch:
            return group.inner, False
        present = tuple(role for role in group.members if role not in self._absent)
        without = None
        if present != group.members:
            without = Partial(group.identity, group.members, self._absent, self.role, self._adopted)
        group.inner = Inner(
            group.identity,
            present,
            present.index(self.role),
            group.devices,
            group.timeout,
            group.options,
            self.epoch,
            group.device if group.device is not None else self._device,
            without,
        )
        return group.inner, True

    def _local(self, group: FtProcessGroup) -> Inner:
        # A group of one has no peer to lose: it stays open over all epochs.
        if self.epoch < self.aborted and not self.startup.recording:
            raise EpochChanged(f"epoch {self.epoch} is over; role {self.role} goes on in the next")
        if group.inner is None:
            inner, _ = self._claim(group)
            inner.connect(dist.HashStore(), "127.0.0.1")
            inner.ready = True
        assert group.inner is not None
        group.inner.epoch = max(self.epoch, self.aborted)
        return group.inner

    def _open(self, inner: Inner, opener: Opener, urgent: bool) -> None:
        error: Exception | None = None
        if inner.asynchronous:
            end = time.monotonic() + ABORTS
            for abort in self._aborts:
                abort.join(max(0, end - time.monotonic()))
            if any(abort.is_alive() for abort in self._aborts):
                log.error(
                    "group %s of epoch %d is opened, though communicators of former epochs could not be "
                    "aborted within %g s: their kernels may hold the GPU and its memory. If epochs go on to "
                    "fail here, drain this node",
                    *(inner.group, inner.epoch, ABORTS),
                )
        try:
            opener.open(inner, urgent, partial(self._watch_opening, inner))
        except Exception as caught:
            error = caught
            self.lacked_memory |= "out of memory" in str(error)
        with self._condition:
            inner.error, inner.ready = error, error is None
            dead = inner.epoch < self.aborted
            complete = not dead and self._all_reopened(inner.epoch)
            self._condition.notify_all()
        if complete and self.reopened is not None:
            self.reopened(inner.epoch)
        if dead:
            inner.close()

    def _watch_opening(self, inner: Inner) -> None:
        """All members are there, and connect now: if that does not end, a new epoch lets them try again."""

        def over() -> bool:
            return inner.ready or inner.error is not None or inner.epoch < self.aborted

        def timed_out() -> None:
            self._give_up(inner, "connecting", f"has not ended within {OPENED:g} s of their meeting")

        self._watchdog.begin(self._device)
        self._watchdog.watch(InFlight(over, lambda: None, timed_out, time.monotonic() + OPENED))

    def _all_reopened(self, epoch: int) -> bool:
        """With the lock: whether this opening was the last of those that the swap began."""
        if self._announced >= epoch or not self._to_reopen:
            return False
        inners = [g.inner for g in self._to_reopen]
        if any(i is None or i.epoch < epoch or not i.ready for i in inners):
            return False
        self._announced = epoch
        return True

    def _reopen(self, epoch: int, groups: Iterator[FtProcessGroup]) -> None:
        while True:
            with self._condition:
                group = next(groups, None)
                if group is None or self.epoch != epoch or epoch < self.aborted:
                    return
                # A group whose members wait for each other is opened by its user, not by this queue.
                inner, fresh = self._claim(group)
                opener = self._opener
            if fresh:
                self._open(inner, opener, group.p2p_used)

    def _on_asked(self, wanted: Series) -> None:
        with self._condition:
            group = self.find(wanted.group)
            if group is None:
                self._asked.add(wanted.group)  # its creation is still to come
                return
            if group.device is None and self._device is None:  # the others know theirs
                group.device = likely_device(group.devices)
            claimed = [self._claim(group)]
            if wanted.pair is not None:
                [peer] = set(wanted.pair) - {self.role}
                inner, _ = claimed[0]
                claimed.append(self._claim_pair(inner, inner.members.index(peer)))
            opener = self._opener
        for inner, fresh in claimed:
            if fresh:
                start("open", self._open, inner, opener, False)

    # -- operations -------------------------------------------------------------------------------

    def issue(
        self,
        group: FtProcessGroup,
        method: str,
        kind: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        epoch: int | None = None,
    ) -> FtWork | None:
        """Open the group in the current epoch, if need be, and `launch` an operation in it. Raises as
        `communicator`, with the same `epoch`."""
        record = self.flight.begin(group.record, self.epoch if epoch is None else epoch, kind, args)
        try:
            inner = group.inner
            if epoch is not None or inner is None or not inner.ready or inner.epoch < self.aborted:
                inner = self.communicator(group, kind, epoch)
            if inner.asynchronous and kind in _POINT_TO_POINT and inner.apart_for(method, args):
                pair = inner.pairs.get(args[1])
                inner = pair if pair is not None and pair.ready else self._pair(inner, args[1])
        except Exception:
            self.flight.end(record)
            raise
        return self.launch(inner, [Call(method, kind, args, kwargs)], (record,))

    def issue_together(self, group: FtProcessGroup, device: torch.device, calls: list[Call]) -> FtWork | None:
        """Issue operations that go out as one, where the backend can do that. Raises as `communicator`."""
        records = tuple(self.flight.begin(group.record, self.epoch, call.kind, call.args) for call in calls)
        try:
            for kind in {call.kind for call in calls}:
                inner = self.communicator(group, kind)
        except Exception:
            self._end_records(records)
            raise
        return self.launch(inner, calls, records, device) if calls else None

    def launch(
        self, inner: Inner, calls: list[Call], records: tuple[int, ...], together: torch.device | None = None
    ) -> FtWork | None:
        """Issue operations, more than one where they go out as one, `together` on a device. None where the
        backend has already ordered them on the caller's stream. `records`: what of the flight record ends
        with them."""
        method = calls[0].method if together is None else "_end_coalescing"
        if inner.asynchronous:
            self._hold_back(inner)
        with self._traffic_lock:
            generation = self._generation
            for call in calls:
                inner.count(call.kind, call.args)
            self._in_flight += 1
            if self._in_flight == 1 and self.traffic is not None:
                self.traffic(1)
        began = time.monotonic()
        try:
            if (pg := inner.pg) is None:
                raise EpochChanged(f"epoch {inner.epoch} is over")
            blocks = method == "barrier" or not inner.connected  # which the first one does
            after: list[Callable[[], None]] = []

            def begin(call: Call) -> Any:
                work, then = inner.begin(*call)
                after.extend([then] if then is not None else [])
                return work

            if together is not None:
                with inner.beginning:
                    if inner.epoch < self.aborted:
                        raise EpochChanged(f"epoch {inner.epoch} is over")
                    with self.watched(inner, method, blocks):
                        pg._start_coalescing(together)
                        try:
                            for call in calls:
                                begin(call)
                        finally:
                            # Also after an error: NCCL's group is the thread's own, and holds back the rest.
                            work = pg._end_coalescing(together)
            elif method == "monitored_barrier" or (inner.checked and not inner.asynchronous):
                # It waits for all others.
                over = lambda: inner.epoch < self.aborted  # noqa: E731
                work = apart(as_here(partial(begin, calls[0])), over, method)
            elif blocks or not inner.asynchronous:
                with self.watched(inner, method, blocks):
                    work = begin(calls[0])
            else:
                with inner.beginning:
                    if inner.epoch < self.aborted:
                        raise EpochChanged(f"epoch {inner.epoch} is over")
                    work = begin(calls[0])
            inner.connected = True
        except Exception as error:
            self.ended(generation)
            self._end_records(records)
            if isinstance(error, (EpochChanged, FtError)):
                raise
            if inner.epoch >= self.aborted and not is_transport_error(error):
                group = self.find(inner.group)
                for call in calls:  # it was refused
                    with self._traffic_lock:
                        inner.count(call.kind, call.args, -1)
                    if group is not None:
                        self.flight.refused(group.record, call.kind, call.args)
                raise
            given = [each for call in calls for each in (*call.args, *call.kwargs.values())]
            limit = next((each for each in given if isinstance(each, timedelta)), None)
            self.failed(inner.epoch, error, self.is_own(inner, error, began, limit))
        self._watchdog.begin(self._device)
        if work is None:
            for then in after:
                then()
            completed = inner.marker() if inner.asynchronous else None
            self.ends_when(inner, method, completed, generation, records)
            return None
        for record in records:
            self.flight.apart(record, True)
        about = self, inner, method, work, generation, tuple(after), records
        by_gloo = inner.by_gloo(calls[0].args)
        if method == "recv_anysource" or (by_gloo and (calls[0].kind in _APART or after)):
            return ApartWork(*about)
        found = FtWork(*about)
        found.looks = by_gloo
        return found

    def _hold_back(self, inner: Inner) -> None:
        """Before one more operation is queued on the device. Raises EpochChanged."""
        self._ahead.wait()
        while inner.epoch >= self.aborted:
            if len(inner.unwaited) < UNWAITED:
                return
            queued = list(inner.unwaited.values())
            if len(queued) < UNWAITED or queued[-UNWAITED].is_completed():
                return
            time.sleep(QUEUED)
        raise EpochChanged(f"epoch {inner.epoch} is over")

    def ends_when(
        self,
        inner: Inner,
        method: str,
        completed: Callable[[], bool] | None,
        generation: int,
        records: tuple[int, ...] = (),
        dropped: bool = False,
    ) -> None:
        """An operation that `launch` counted was waited for. It is over once it is `completed`; None: now.
        `dropped`: nobody waits for it any more."""
        if completed is None:
            self.ended(generation)
            self._end_records(records)
            return

        def over() -> bool:
            return generation != self._generation or completed()

        if not inner.asynchronous:
            self.ended(generation)
            # A send or a receive that is dropped is cancelled. Anything else goes on, and may never end.
            if not dropped or COLLECTIVES.get(method) in _POINT_TO_POINT or completed():
                self._end_records(records)
            else:
                unlimited = InFlight(over, lambda: self._end_records(records), lambda: None, math.inf)
                self._watchdog.watch(unlimited)
            return

        def ended() -> None:
            self.ended(generation)
            self._end_records(records)

        self._watch(inner, method, over, ended)

    def _watch(self, inner: Inner, method: str, over: Callable[[], bool], ended: Callable[[], None]) -> None:
        """Give up what is in flight on a device once it takes longer than its group's limit, or its link has
        failed."""

        def timed_out() -> None:
            late = f"has not ended within the group's time-out of {inner.timeout}"
            self._give_up(inner, method, late)

        def broken(error: str) -> None:
            self._give_up(inner, method, f"cannot end: {error}", by_link=True)

        deadline = time.monotonic() + inner.timeout.total_seconds()
        self._watchdog.watch(InFlight(over, ended, timed_out, deadline, inner.link_error, broken))

    def watched(self, inner: Inner, method: str, blocks: bool) -> AbstractContextManager[None]:
        """While the host is in a call of torch's, which `blocks` until a device or a peer has done its
        part."""
        return self._watched(inner, method) if blocks and inner.asynchronous else _UNWATCHED

    @contextmanager
    def _watched(self, inner: Inner, method: str) -> Iterator[None]:
        returned = threading.Event()
        self._watchdog.begin(self._device)
        self._watch(inner, method, returned.is_set, lambda: None)
        try:
            yield
        finally:
            returned.set()

    def _give_up(self, inner: Inner, method: str, why: str, by_link: bool = False) -> None:
        """What the device has to do does not end, unless with the epoch."""
        reason = f"{method} in group {inner.group} of epoch {inner.epoch} {why}"
        try:
            self.failed(inner.epoch, RuntimeError(reason), by_link=by_link)
        except EpochChanged:
            return
        except RuntimeError as error:
            self.hung(str(error), by_link)

    def awaits(self, records: tuple[int, ...]) -> None:
        """These operations of the flight record, which went on apart, are waited for."""
        for record in records:
            self.flight.apart(record, False)

    def _end_records(self, records: tuple[int, ...]) -> None:
        for record in records:
            self.flight.end(record)

    def ended(self, generation: int) -> None:
        """An operation that `launch` counted is over."""
        with self._traffic_lock:
            if generation == self._generation:
                self._in_flight -= 1
                if self._in_flight == 0 and self.traffic is not None:
                    self.traffic(0)

    def issued(self) -> tuple[dict[Series, int], list[GroupId]]:
        """Operations begun in this epoch, and groups of which others are waited for to connect. Any thread.

        Who has come to the end of its script takes part in no more than it has told here.
        """
        with self._condition, self._traffic_lock:
            found: dict[Series, int] = {}
            unopened = []
            for inner in (group.inner for group in self._groups):
                if inner is not None and inner.epoch == self.epoch and inner.size > 1:
                    found |= inner.issued
                    if inner.wanted and not inner.ready:
                        found[Series(inner.group)] = 1
                        unopened.append(inner.group)
            return found, unopened

    # -- start-up phase ---------------------------------------------------------------------------

    def end_startup(self) -> None:
        """The first training section begins. Raises ReplayMismatch if peers did more start-up than this."""
        self.startup.complete()
        with self._condition:
            self.startup.end(g.identity for g in self._groups)

    def reached(self, step: int) -> None:
        """The script has come to a step, see `Startup.reached`."""
        with self._condition:
            self.startup.reached(step)

    def operations(self) -> dict[str, int]:
        """How many operations were issued, see `Startup.operations`."""
        with self._condition:
            return self.startup.operations()

    def newcomers_begin_at(self, step: int) -> None:
        """Newcomers begin at a step, see `Startup.newcomers_begin_at`."""
        with self._condition:
            self.startup.newcomers_begin_at(step)

    def keep_records(self, wanted: bool) -> None:
        """Keep records, or do so no more, see `Startup.keep`. Any thread."""
        with self._condition:
            self.startup.keep(wanted)

    def startup_counts(self) -> dict[RecordCount, int]:
        """What is on record here, see `StartupLog.counts`. Any thread."""
        with self._condition:
            return self.startup.counts()

    def learn(self, completed: CountsByRole) -> None:
        """Start-up operations that others have completed since this epoch's plan was made, as in `swap`."""
        with self._condition:
            self.startup.learn(completed)

    def startup_entries(self, series: Series, start: int) -> dict[Series, list[StartupEntry]]:
        """What a peer needs to replay operations, see `StartupLog.entries`. Any thread."""
        with self._condition:
            return self.startup.log.entries(series, start)

    # -- groups -----------------------------------------------------------------------------------

    def create(
        self,
        members: tuple[int, ...],
        requested: str,
        timeout: timedelta,
        store: dist.Store,
        options: Any,
        device: int | None = None,
    ) -> FtProcessGroup:
        """Make a group; local to this process. `device`: which the script has bound it to."""
        with self._condition:
            key = tuple(sorted(members))
            group = FtProcessGroup(self, members, self._created[key], requested, timeout, store, options)
            group.device = device if device is not None else device_of_thread(group.devices)
            self._device = group.device if group.device is not None else self._device
            self._created[key] += 1
            self._groups.append(group)
            asked = group.identity in self._asked
        if asked:
            self._on_asked(Series(group.identity))
        return group

    def find(self, identity: GroupId) -> FtProcessGroup | None:
        """The group, which all members call so; None while there is none."""
        return next((g for g in self._groups if g.identity == identity), None)

    def forget(self, group: FtProcessGroup, wake: bool) -> None:
        """Destroy a group."""
        with self._condition:
            if group in self._groups:
                self._groups.remove(group)
                self.flight.drop(group.record)
            inner, group.inner, group.destroyed = group.inner, None, True
        for each in () if inner is None else (inner, *inner.pairs.values()):
            if each.ready:
                if wake:
                    each.wake()
                else:
                    self._finish(each)
                start("closer", each.close).join(CLOSE_TIMEOUT)

    def _finish(self, inner: Inner) -> None:
        """What a device has yet to do in a group that is destroyed, it does first, for as long as others may
        take to come."""
        end = time.monotonic() + inner.timeout.total_seconds()
        finishing = start("finish", inner.finish)
        while finishing.is_alive():
            if inner.epoch < self.aborted or time.monotonic() > end:
                start("wake", inner.wake).join(CLOSE_TIMEOUT)
                return
            finishing.join(_LOOK)


def _close(inners: list[Inner]) -> None:
    for inner in inners:
        inner.close()
