"""The process group that outlives its communicator, as torch and the frameworks see it.

`FtProcessGroup` delegates every collective to the `Inner` of the current epoch. Its references stay
valid in models, optimizers and buckets over any number of epochs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

import ft_core
from ft_core.comm.inner import Inner, devices_of, start
from ft_core.errors import EpochChanged

if TYPE_CHECKING:
    from ft_core.comm.process_group import Communicators

COLLECTIVES = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce",
    "broadcast": "broadcast",
    "allgather": "allgather",
    "_allgather_base": "allgather",
    "all_gather_single": "allgather",
    "allgather_coalesced": "allgather",
    "all_gather_single_coalesced": "allgather",
    "allgather_into_tensor_coalesced": "allgather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall",
    "all_to_all_single": "alltoall",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
"""Method of torch's `ProcessGroup`, under its old and its new name -> the kind it is counted as."""

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


def is_the_scripts(error: BaseException) -> bool:
    """Whether Python code that is not the engine's raised it: a signal's handler, a hook.

    Such code runs while an operation is waited for. What a backend raises comes out of C++.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(_ENGINE)


class FtWork(dist.Work):
    """An operation under way. Errors of the transport become EpochChanged, see `Communicators.failed`."""

    def __init__(
        self,
        comms: Communicators,
        inner: Inner,
        method: str,
        work: Any,
        generation: int,
        after: Callable[[], None] | None = None,
    ) -> None:
        """`after`: what completes the results once the work is done; called once, and may wait."""
        super().__init__()
        self._comms, self._inner, self._work, self._generation = comms, inner, work, generation
        self._method = method
        self._flying = True
        self._after = after

    def _end(self) -> None:
        if self._flying:
            self._flying = False
            self._comms.landing(self._inner, self._method, self._work.is_completed, self._generation)

    def __del__(self) -> None:
        self._end()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result. Raises EpochChanged within milliseconds of an abort.

        On a GPU only the caller's stream waits, and an abort is seen by whoever waits for the device.
        """
        try:
            done = self._work.wait(timeout) if timeout else self._work.wait()
            self._complete()
        except Exception as error:
            self._end()
            self._comms.failed(self._inner.epoch, error)
        self._end()
        if self._inner.asynchronous and self._inner.epoch < self._comms.aborted:
            raise EpochChanged(f"epoch {self._inner.epoch} ended during {self._method}")
        return bool(done)

    def _complete(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after()

    def is_completed(self) -> bool:
        """Whether it has finished, well or badly."""
        if self._work.is_completed():
            self._end()
            return True
        return False

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future, which fails with EpochChanged where `wait` would."""
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


class AnySourceWork(FtWork):
    """gloo never wakes a receive from any source, so a helper thread waits for it."""

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

        thread = start("anysource", helper)
        self._comms.wait_for(lambda: bool(outcome), self._inner.epoch)
        self._end()
        if not outcome:
            self._comms.failed(self._inner.epoch, RuntimeError("the epoch ended while waiting for a sender"))
        thread.join()
        if outcome[0] is not None:
            self._comms.failed(self._inner.epoch, outcome[0])
        return True


def devices_of_future(future: Any) -> list[str]:
    """Device types that a future's value lives on; empty for a future of host tensors."""
    devices = getattr(future, "devices", None)
    return [d.type for d in devices()] if callable(devices) else []


class FtProcessGroup(dist.ProcessGroup):
    """A group of roles. `name` in the store, the log and the plan is `ft_name`, equal on all members."""

    def __init__(
        self,
        comms: Communicators,
        members: tuple[int, ...],
        index: int,
        requested: str,
        timeout: timedelta,
        store: dist.Store,
        options: Any,
    ) -> None:
        rank = members.index(comms.role)
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self.ft_name = group_name(members, index)
        self.members, self.requested, self.timeout, self.options = members, requested, timeout, options
        self.devices = devices_of(requested)
        self.inner: Inner | None = None
        self.used = False
        self.p2p_used = False
        self.cuda_device: int | None = None
        self._comms, self._store = comms, store
        self._rank, self._size = rank, len(members)
        self._name = self._desc = ""
        self.coalescing = False

    def _issue(self, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        comms = self._comms
        comms.counts[kind] += 1
        if comms.startup.recording and not self.coalescing:
            return comms.startup.run(self, method, kind, args, kwargs)
        inner = self.inner
        if inner is None or not inner.ready or inner.epoch < comms.aborted:
            inner = comms.communicator(self, kind)
        return comms.launch(inner, method, args, kwargs)

    # -- what torch and the frameworks ask a group ------------------------------------------------

    def rank(self) -> int:
        """This role's place among the members."""
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return self._size

    def name(self) -> str:
        """The backend that does the work ("gloo" or "nccl")."""
        return self.devices.get("cuda") or self.devices["cpu"]

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """For C++, which takes a group of the name "gloo" for one that has torch's own object inside."""
        return "ft"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """torch's own name of the group, local to the process."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the script calls the group."""
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802
        """For C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """For C++."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_default_backend(self, backend_type: Any) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        inner = self.inner
        if inner is not None and inner.pg is not None:
            inner.pg.set_timeout(timeout)

    set_timeout = _set_default_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(d) for d in self.devices]

    def _get_backend(self, device: torch.device) -> Any:
        # The group itself: the inner backend would not outlive the epoch, and callers keep it.
        if torch.device(device).type not in self.devices:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    supports_splitting = False
    supports_time_estimate = False
    supports_shrinking = False

    @property
    def supports_coalescing(self) -> bool:
        """Whether operations between start and end of coalescing go out as one."""
        return "nccl" in self.devices.values()

    def get_group_store(self) -> dist.Store:
        """A store local to this process: nothing of torch's start-up needs a shared one here."""
        return self._store

    def _start_coalescing(self, device: torch.device) -> None:
        if self._comms.startup.rehearsing:
            return
        self.coalescing = True
        self._comms.communicator(self, "send").pg._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if self._comms.startup.rehearsing:
            return self._comms.startup.run(self, "barrier", "barrier", (), {})
        self.coalescing = False
        return self._comms.launch(self._comms.communicator(self, "send"), "_end_coalescing", (device,), {})

    def abort(self) -> None:
        """Make what is pending fail, and forget the group."""
        self._comms.forget(self, wake=True)

    def shutdown(self) -> None:
        """Forget the group (`destroy_process_group`). Never hangs."""
        self._comms.forget(self, wake=False)


def _delegate(method: str, kind: str) -> Callable[..., Any]:
    def call(self: FtProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._issue(method, kind, args, kwargs)

    call.__name__ = method
    call.__doc__ = f"See `torch.distributed.ProcessGroup.{method}`."
    return call


for _method, _kind in COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _method):
        setattr(FtProcessGroup, _method, _delegate(_method, _kind))


def group_name(members: tuple[int, ...], index: int) -> str:
    """Equal on all members and for a newcomer: the members as runs "first-last:stride", and how many
    groups of the same members were created before."""
    ordered, runs = sorted(members), []
    at = 0
    while at < len(ordered):
        last = at
        stride = ordered[at + 1] - ordered[at] if at + 1 < len(ordered) else 1
        while last + 1 < len(ordered) and ordered[last + 1] - ordered[last] == stride:
            last += 1
        runs.append(str(ordered[at]) if last == at else f"{ordered[at]}-{ordered[last]}:{stride}")
        at = last + 1
    return f"{','.join(runs)}#{index}"


def members_of(name: str) -> set[int]:
    """Inverse of `group_name`."""
    found: set[int] = set()
    for run in name.partition("#")[0].split(","):
        if "-" not in run:
            found.add(int(run))
            continue
        first, last, stride = map(int, re.split("[-:]", run))
        found.update(range(first, last + 1, stride))
    return found
