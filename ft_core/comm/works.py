"""Operations under way: what torch calls a work, and what their errors mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import distributed as dist

import ft_core
from ft_core.comm.inner import Inner, start
from ft_core.errors import EpochChanged

_TRANSPORT = re.compile(
    r"gloo/transport|pair closure|connection|socket|broken pipe|timed? ?out|nccl|remote|store", re.I
)


def is_transport_error(error: Exception) -> bool:
    """Whether an error raised while an operation was *issued* is a lost peer, not the caller's mistake.

    torch checks arguments before anything is queued, and gloo's collectives only queue: so an error at
    issue is the caller's, unless its text is one of the transport's (gloo's point-to-point operations
    and NCCL touch the connection at issue). An error out of `wait` is always the transport's, unless it
    `is_the_scripts`; when it was not (ranks passed different sizes), no epoch follows and it is raised after
    the grace period.
    """
    if isinstance(error, (TypeError, ValueError, NotImplementedError)):
        return False
    return isinstance(error, dist.DistError) or (
        "ProcessGroupGloo::" not in str(error) and _TRANSPORT.search(str(error)) is not None
    )


_ENGINE = Path(ft_core.__file__).parent

_LOOK = timedelta(seconds=0.25)
"""How often who waits for one of gloo's operations looks whether it will ever end."""


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

    def failed(self, epoch: int, error: Exception) -> NoReturn:
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

    def awaits(self, records: tuple[int, ...]) -> None:
        """These operations of the flight record, which went on apart, are waited for."""

    def wait_for(self, predicate: Callable[[], bool], epoch: int) -> None:
        """Block until `predicate` or the end of `epoch`. Whoever makes it true calls `notify`."""

    def notify(self) -> None:
        """Have waiters look again."""


class FtWork(dist.Work):
    """An operation under way. Errors of the transport become EpochChanged, see `Communicators.failed`."""

    def __init__(
        self,
        comms: Epochs,
        inner: Inner,
        method: str,
        work: Any,
        generation: int,
        after: Callable[[], None] | None = None,
        records: tuple[int, ...] = (),
    ) -> None:
        """`after`: what completes the results once the work is done; called once, and may wait. `records`:
        what it is in the flight record."""
        super().__init__()
        self._comms, self._inner, self._work, self._generation = comms, inner, work, generation
        self._method = method
        self._counted = True
        self._after = after
        self._records = records
        self.looks = False
        """Whether it is gloo's, and `wait` must not rely on being woken."""

    def _end(self, dropped: bool = False) -> None:
        if self._counted:
            self._counted = False
            what = self._inner, self._method, self._work.is_completed, self._generation, self._records
            self._comms.ends_when(*what, dropped)

    def __del__(self) -> None:
        self._end(dropped=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result. Raises EpochChanged within milliseconds of an abort.

        On a GPU only the caller's stream waits, and an abort is seen by whoever waits for the device.
        """
        self._comms.awaits(self._records)
        try:
            done = self._work.wait(timeout) if timeout else self._wait()
            self._complete()
        except Exception as error:
            self._end()
            self._comms.failed(self._inner.epoch, error)
        self._end()
        if self._inner.asynchronous and self._inner.epoch < self._comms.aborted:
            raise EpochChanged(f"epoch {self._inner.epoch} ended during {self._method}")
        return bool(done)

    def _wait(self) -> bool:
        """When gloo closes a connection it tells who waits for operations that have not begun there, and not
        who waits for one that is half sent or half received (`Pair::signalException`). Such a one does not
        end before its time-out. It is left where it is: what it reads and writes nobody touches any more.
        """
        if not self.looks:
            return self._work.wait()
        over = False
        while True:
            try:
                return self._work.wait(_LOOK)
            except RuntimeError as error:
                if self._work.is_completed() or is_the_scripts(error):
                    raise
                if over:
                    raise EpochChanged(f"epoch {self._inner.epoch} ended during {self._method}") from error
                over = self._inner.epoch < self._comms.aborted

    def _complete(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after()

    def is_completed(self) -> bool:
        """Whether it has finished, well or badly."""
        if self._work.is_completed():
            self._end()
            return True
        self._comms.awaits(self._records)  # who asks may do so until it has
        return False

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future, which fails with EpochChanged where `wait` would."""
        self._comms.awaits(self._records)  # what becomes of it is not known here
        inner = self._work.get_future()
        if any(t == "cuda" for t in devices_of_future(inner)):
            return inner  # completed in stream order; NCCL's errors do not come this way
        future: torch.futures.Future[Any] = torch.futures.Future()

        def settle(done: torch.futures.Future[Any]) -> None:
            try:
                value = done.value()
                self._complete()
            except Exception as error:
                # Finding out what it was may block; gloo's thread that runs this must not.
                start("future", self._settle_failure, future, error)
                return
            self._end()
            future.set_result(value)

        inner.add_done_callback(settle)
        return future

    def _settle_failure(self, future: torch.futures.Future[Any], error: Exception) -> None:
        self._end()
        try:
            self._comms.failed(self._inner.epoch, error)
        except Exception as verdict:
            future.set_exception(verdict)

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
        """Of `recv_anysource`: who sent, as a rank in the group."""
        return self._work._source_rank()

    _source_rank = source_rank

    def block_current_stream(self) -> None:
        """Make the current stream wait, not the host."""
        self._work.block_current_stream()


class ApartWork(FtWork):
    """One that gloo may never wake, and that a look at it (`FtWork._wait`) would end: a helper thread waits.

    A receive from any source, and a send or a receive of so much that it may be interrupted halfway.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result. Raises EpochChanged within milliseconds of an abort."""
        outcome: list[Exception | None] = []

        def helper() -> None:
            try:
                self._work.wait(timeout) if timeout else self._work.wait()
                outcome.append(None)
            except Exception as error:
                outcome.append(error)
            self._comms.notify()

        self._comms.awaits(self._records)
        thread = start("apart", helper)
        self._comms.wait_for(lambda: bool(outcome), self._inner.epoch)
        self._end()
        if not outcome:
            self._comms.failed(self._inner.epoch, RuntimeError("the epoch ended while waiting for a sender"))
        thread.join()
        if outcome[0] is not None:
            self._comms.failed(self._inner.epoch, outcome[0])
        return True


class CompletedWork(dist.Work):
    """An operation that is complete."""

    def __init__(self, results: list[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._results, self._source = results, source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once: there is nothing to wait for, whatever the `timeout`."""
        return True

    def is_completed(self) -> bool:
        """Always, since an operation of start-up is issued and completed in one call."""
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
        """Of `recv_anysource`: who sent, as a rank in the group."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that has its value."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


def devices_of_future(future: Any) -> list[str]:
    """Device types that a future's value lives on; empty for a future of host tensors."""
    devices = getattr(future, "devices", None)
    return [d.type for d in devices()] if callable(devices) else []
