"""Operations under way: what torch calls a work, and what their errors mean."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as cpp

import ft_core
from ft_core.comm.apart import LOOK, R, apart
from ft_core.comm.inner import Inner, start
from ft_core.errors import EpochChanged
from ft_core.process import stream

_TRANSPORT = re.compile(
    r"gloo/transport|pair closure|connection|socket|broken pipe|timed? ?out|nccl|remote|store|"
    r"monitoredBarrier",
    re.I,
)
_TIMEOUT = re.compile("timed? ?out|monitoredBarrier", re.I)


def is_transport_error(error: Exception) -> bool:
    """Whether an error raised while an operation was *issued* is a lost peer, not the caller's mistake.

    torch checks arguments before anything is queued, and gloo's collectives only queue: so an error at
    issue is the caller's, unless its text is one of the transport's (gloo's point-to-point operations
    and NCCL touch the connection at issue).
    """
    if isinstance(error, (TypeError, ValueError, NotImplementedError)):
        return False
    return isinstance(error, dist.DistError) or (
        "ProcessGroupGloo::" not in str(error) and _TRANSPORT.search(str(error)) is not None
    )


_from_future: Callable[[Any], dist.Work] = cpp._create_work_from_future  # type: ignore[attr-defined]


def is_mistake(error: Exception) -> bool:
    """Whether an error out of the `wait` of a gloo operation is the caller's mistake: torch has refused it
    where it would have begun. What gloo itself raises names its source file, or the connection.

    Where ranks pass different sizes it is gloo that notices: no epoch follows, and that is raised after the
    grace period.
    """
    return not is_transport_error(error) and "gloo/" not in str(error)


def is_timeout(error: Exception) -> bool:
    """Whether an error may be that something took longer than it was given."""
    return _TIMEOUT.search(str(error)) is not None


_ENGINE = Path(ft_core.__file__).parent

_LOOK, _TICK = timedelta(seconds=LOOK), timedelta(milliseconds=1)
"""The second is the shortest time that torch waits: less is without an end."""


def is_the_scripts(error: BaseException) -> bool:
    """Whether Python code that is not the engine's raised it: a signal's handler, a hook.

    Such code runs while an operation is waited for. What a backend raises comes out of C++.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(_ENGINE)


class Epochs(Protocol):
    """What an operation needs of the communicators of its process, see `process_group.Communicators`."""

    aborted: int

    def is_own(self, inner: Inner, error: Exception, began: float, limit: timedelta | None) -> bool:
        """Whether the script is why an operation has failed."""

    def failed(self, epoch: int, error: Exception, own: bool = False) -> NoReturn:
        """Find out why an operation of `epoch` failed, and raise accordingly."""

    def ends_when(
        self,
        inner: Inner,
        method: str,
        completed: Callable[[], bool] | None,
        generation: int,
        records: tuple[int, ...] = (),
        dropped: bool = False,
    ) -> None:
        """An operation was waited for, or `dropped`. It is over once it is `completed`; None: now."""

    def watched(self, inner: Inner, method: str, blocks: bool) -> AbstractContextManager[None]:
        """While the host waits in torch."""

    def awaits(self, records: tuple[int, ...]) -> None:
        """These operations of the flight record, which went on apart, are waited for."""

    def promise(self, promise: Promise) -> None:
        """It fails soon after the end of its epoch, whatever becomes of the operation."""

    def settled(self, promise: Promise) -> None:
        """That it does not need any more."""


class Promise:
    """A future of an operation's result, which is settled once: by the operation, or the end of its epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._open = [None]

    def _first(self) -> bool:
        try:
            self._open.pop()
        except IndexError:
            return False
        return True

    def keep(self, value: Any) -> None:
        """There is the result."""
        if self._first():
            self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        """There is none."""
        if self._first():
            self.future.set_exception(error)


class FtWork(dist.Work):
    """An operation under way. Errors of the transport become EpochChanged, see `Communicators.failed`."""

    def __init__(
        self,
        comms: Epochs,
        inner: Inner,
        method: str,
        work: Any,
        generation: int,
        after: tuple[Callable[[], None], ...] = (),
        records: tuple[int, ...] = (),
    ) -> None:
        """`after`: what completes the results once the work is done; called once, and may wait. `records`:
        what it is in the flight record."""
        super().__init__()
        self._comms, self._inner, self._work, self._generation = comms, inner, work, generation
        self._method, self._began = method, time.monotonic()
        self._counted, self._waited = True, False
        self._after = after
        self._records = records
        if inner.asynchronous:
            inner.unwaited[id(work)] = work
        self.looks = False
        """Whether it is gloo's, and `wait` must not rely on being woken."""

    def _end(self, dropped: bool = False, waited: bool = False) -> None:
        if self._counted:
            self._counted = False
            inner = self._inner
            inner.unwaited.pop(id(self._work), None)
            # The work holds its results, which the script may be rid of before the device has come there.
            by_device = waited and inner.asynchronous and not self.looks
            completed = inner.marker() if by_device else self._work.is_completed
            self._comms.ends_when(inner, self._method, completed, self._generation, self._records, dropped)

    def __del__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self._end(dropped=True)

    @property
    def has_ended(self) -> bool:
        """Whether it has finished, well or badly; without waiting for it."""
        return bool(self._work.is_completed())

    @property
    def goes_on(self) -> bool:
        """Whether no wait has ended it yet."""
        return self._counted

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result. Raises EpochChanged within milliseconds of an abort.

        On a GPU only the caller's stream waits, and an abort is seen by whoever waits for the device.
        Elsewhere once is enough: gloo would wait for another message.
        """
        if self._waited:
            return True
        began = time.monotonic() if timeout else self._began
        self._comms.awaits(self._records)
        try:
            # Of these alone it is the host that waits.
            with self._comms.watched(self._inner, self._method, bool(timeout) or self._method == "barrier"):
                done = self._wait(timeout)
        except Exception as error:
            if self.looks and not (self._over() or self._work.is_completed()):
                raise  # after the time that the caller has given; it goes on
            self._end()
            self._failed(error, began, timeout)
        self._end(waited=True)
        if not self._inner.asynchronous:
            self._waited = True
        elif self._over():
            raise EpochChanged(f"epoch {self._inner.epoch} ended during {self._method}")
        return bool(done)

    def complete(self, timeout: timedelta | None = None) -> None:
        """`wait`, on the host: the results are there, or garbage, if the epoch is over."""
        self.wait(timeout)
        if self._inner.asynchronous:
            stream.settle()

    def _failed(self, error: Exception, began: float, limit: timedelta | None) -> NoReturn:
        own = self._comms.is_own(self._inner, error, began, limit)
        self._comms.failed(self._inner.epoch, error, own)

    def _wait(self, timeout: timedelta | None) -> bool:
        """Wait for one that does not end once its epoch is over (`apart` says which), no more than two looks.
        It is left where it is: what it reads and writes nobody touches any more.
        """
        if not self.looks:
            return self._finish(timeout)
        end = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        look, over = _LOOK, False
        while True:
            if timeout:
                look = max(_TICK, min(_LOOK, timedelta(seconds=end - time.monotonic())))
            try:
                return self._finish(look)
            except RuntimeError as error:
                if is_the_scripts(error):
                    raise
                if self._work.is_completed():  # also where that came just after the look
                    return self._finish(None)
                if time.monotonic() > end:
                    raise
                if over:
                    raise EpochChanged(f"epoch {self._inner.epoch} ended during {self._method}") from error
                over = self._over()

    def _finish(self, timeout: timedelta | None) -> bool:
        done = self._work.wait(timeout) if timeout else self._work.wait()
        self._complete()
        return bool(done)

    def _over(self) -> bool:
        return self._inner.epoch < self._comms.aborted

    def _complete(self) -> None:
        after, self._after = self._after, ()
        for each in after:
            each()

    def is_completed(self) -> bool:
        """Whether it has finished, well or badly, or will never: its epoch is over."""
        if self._work.is_completed() or self._over():
            self._end()
            return True
        self._comms.awaits(self._records)  # who asks may do so until it has
        return False

    def synchronize(self) -> None:
        """Make the caller's stream wait for the result; nothing where there is none, as with gloo."""
        if self._inner.asynchronous:
            self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future, which fails with EpochChanged where `wait` would."""
        self._comms.awaits(self._records)  # what becomes of it is not known here
        inner = self._work.get_future()
        if self._inner.asynchronous and not self.looks:
            return inner  # completed in stream order; NCCL's errors do not come this way
        promise = Promise(self._inner.epoch)
        self._comms.promise(promise)

        def settle(done: torch.futures.Future[Any]) -> None:
            try:
                value = done.value()
                self._complete()
            except Exception as error:
                # Finding out what it was may block; gloo's thread that runs this must not.
                start("future", self._settle_failure, promise, error)
                return
            self._end()
            self._comms.settled(promise)
            promise.keep(value)

        inner.add_done_callback(settle)
        return promise.future

    def _settle_failure(self, promise: Promise, error: Exception) -> None:
        self._end()
        try:
            self._failed(error, self._began, None)
        except Exception as verdict:
            self._comms.settled(promise)
            promise.fail(verdict)

    def is_success(self) -> bool:
        """Whether it finished well."""
        return self._work.is_success()

    def exception(self) -> Any:
        """What it failed with."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._work.result()

    def source_rank(self) -> int:
        """Who sent what `recv_anysource` got, as a rank in the group."""
        return self._work._source_rank()

    _source_rank = source_rank

    def block_current_stream(self) -> None:
        """Make the current stream wait, not the host."""
        self._work.block_current_stream()


class ApartWork(FtWork):
    """One of gloo's that a helper thread waits for, since a look at it (`FtWork._wait`) would end it, or has
    no end: a send, a receive, a reduce-scatter, and what has something to be done after it.
    """

    def _wait(self, timeout: timedelta | None) -> bool:
        call = lambda: self._finish(timeout)  # noqa: E731
        # Nothing but what copies heeds the modes.
        as_it_is = self._method.startswith(("send", "recv"))
        return apart(call if as_it_is else as_here(call), self._over, self._method)


def as_here(call: Callable[[], R]) -> Callable[[], R]:
    """The same for another thread, under the modes of this one."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if modes == (True, False):  # a thread begins with these
        return call

    def called() -> R:
        with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
            return call()

    return called


class Together(dist.Work):
    """Several operations, of which each is waited for."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Whether all of them are."""
        return all(work.is_completed() for work in self._works)

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()


class CompletedWork(dist.Work):
    """An operation that needs no peers: in a group of one, in a rehearsal, or where nothing is said."""

    def __init__(self, results: list[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._results, self._source = results, source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once: there is nothing to wait for, whatever the `timeout`."""
        return True

    def is_completed(self) -> bool:
        """Always, since it is complete when it is issued."""
        return True

    def is_success(self) -> bool:
        """Always: an operation that fails raises where it is issued."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._results

    def source_rank(self) -> int:
        """Who sent what `recv_anysource` got, as a rank in the group."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that has its value."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


def for_cpp(work: dist.Work) -> dist.Work:
    """The same, for C++ alone to keep: it does not keep what is Python's of a work,
    without which ours is waited for for ever."""
    return _from_future(work.get_future()) if type(work).__module__.startswith("ft_core.") else work
