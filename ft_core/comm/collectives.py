"""The process group that outlives its communicator, as torch and the frameworks see it.

`FtProcessGroup` delegates every collective to the `Inner` of the current epoch. Its references stay
valid in models, optimizers and buckets over any number of epochs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed as dist

from ft_core.comm.flight import FlightRecorder
from ft_core.comm.inner import Inner, asynchronous, devices_of, options_of
from ft_core.comm.works import FtWork
from ft_core.protocol.groups import GroupId

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


class Call(NamedTuple):
    """An operation that is still to be issued."""

    method: str
    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder(Protocol):
    """What start-up operations go through, see `startup`."""

    recording: bool
    rehearsing: bool

    def run(
        self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Issue one operation, or take its result from the record."""

    def run_together(self, group: FtProcessGroup, calls: list[Call]) -> Any:
        """Complete some that wait for each other."""


class Registry(Protocol):
    """What a group needs of the communicators that it is one of, see `process_group`."""

    role: int
    counts: Counter[str]
    flight: FlightRecorder

    @property
    def startup(self) -> Recorder:
        """The record of start-up's operations."""

    def issue(
        self, group: FtProcessGroup, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FtWork | None:
        """Issue an operation on the inner communicator. None: it has no work to wait for."""

    def issue_together(self, group: FtProcessGroup, device: torch.device, calls: list[Call]) -> FtWork | None:
        """Issue operations that go out as one."""

    def forget(self, group: FtProcessGroup, wake: bool) -> None:
        """Destroy a group."""


class FtProcessGroup(dist.ProcessGroup):
    """A group of roles. In the store, in records and messages it is `identity`, equal on all members."""

    def __init__(
        self,
        comms: Registry,
        members: tuple[int, ...],
        ordinal: int,
        requested: str,
        timeout: timedelta,
        store: dist.Store,
        options: Any,
    ) -> None:
        rank = members.index(comms.role)
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self.identity = GroupId.of(members, ordinal)
        self.members, self.requested, self.timeout = members, requested, timeout
        self.devices = devices_of(requested)
        self.options = options_of(self.devices) if options is None else options
        self.options._timeout = timeout
        self.inner: Inner | None = None
        self.used = self.destroyed = False
        self.p2p_used = False
        self.device: int | None = None
        """What the group works on, once that is known: who opens a communicator without it opens another than
        the other members."""
        self._comms, self._store = comms, store
        self._rank, self._size = rank, len(members)
        self._name = self._desc = ""
        self.coalesced: list[Call] | None = None
        """What was issued since coalescing began; None outside of it."""
        self.record = comms.flight.add(self.identity, members, self.name())

    def _issue(self, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        comms = self._comms
        comms.counts[kind] += 1
        if self.coalesced is not None:
            self.coalesced.append(Call(method, kind, args, kwargs))
            return None
        if comms.startup.recording:
            return comms.startup.run(self, method, kind, args, kwargs)
        return comms.issue(self, method, kind, args, kwargs)

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
        """Called by torch's C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Called by torch's C++."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        self._comms.flight.call(self.record, desc)

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_default_backend(self, backend_type: Any) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = self.options._timeout = timeout
        if (inner := self.inner) is not None:
            inner.set_timeout(timeout)

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
        return asynchronous(self.devices)

    def coalesces(self, device: str) -> bool:
        """Whether operations on devices of this type go out as one."""
        return asynchronous({device: self.devices[device]}) if device in self.devices else False

    def get_group_store(self) -> dist.Store:
        """What the script has of keys that all roles share, see `store`."""
        return self._store

    def _start_coalescing(self, device: torch.device) -> None:
        # Nothing is begun before the end: torch does not come there if anything is raised in between, and
        # NCCL's group, which is the thread's own, would stay open.
        if not self.supports_coalescing:
            raise RuntimeError(f"Backend {self.name()} does not support startCoalescing")
        self.coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        calls, self.coalesced = self.coalesced or [], None
        if self._comms.startup.recording:
            return self._comms.startup.run_together(self, calls)
        return self._comms.issue_together(self, device, calls)

    @contextmanager
    def together(self, device: torch.device) -> Iterator[list[Any]]:
        """What is issued here goes out as one; its works, at the end."""
        works: list[Any] = []
        self._start_coalescing(device)
        try:
            yield works
            works += [work] if (work := self._end_coalescing(device)) is not None else []
        finally:
            self.coalesced = None

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
