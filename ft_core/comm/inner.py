"""The communicator inside a process group: it belongs to one epoch and is thrown away with it.

Opening is a rendezvous over the epoch's store. Every opening runs in a helper thread, so that nobody who
waits for one opening can hold up another. The end of the epoch closes the connection to its store, which
wakes them all.

Opening is lazy, but connecting needs every member. A member that would not come by itself, because it
has no business with the group yet, is *asked* through the store and opens in the background: at once
for point-to-point operations, which concern two members only, and after `PATIENCE` for collectives. Workers
that are new in their roles have not used any group: peers who connect theirs again ask those at once.
Without this, two processes that first use two groups in a different order would wait for each other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig, _ProcessGroupWrapper

from ft_core.comm import strict
from ft_core.comm.partial import Fill, Partial
from ft_core.comm.rendezvous import EpochStore, connected
from ft_core.errors import EpochChanged
from ft_core.process import stream
from ft_core.protocol.groups import GroupId, Series

log = logging.getLogger(__name__)

_ErrorType = torch._C._distributed_c10d.ErrorType
_SOUND = (_ErrorType.SUCCESS, _ErrorType.TIMEOUT)
"""What is no error of a link. torch counts the time of an operation from where it is issued, though its peers
may have something else to do first; `watchdog` counts it from where it is waited for."""

NOW, PATIENCE = timedelta(0), timedelta(seconds=0.5)
"""How long an opening waits for members to come by themselves before it asks them."""

STORE_LOST = timedelta(seconds=30)
"""How long an epoch may go on without its store before that is told."""
_POLL = 0.05
_BEGINS = 0.5
"""Seconds that an abort waits for operations that are just being begun."""

INTERFACES = "GLOO_SOCKET_IFNAME"
"""The environment variable by which somebody has said where gloo is to listen."""
WAKE_TAG = 0x7F7
"""Tag of the receive that never matches: it only exists to time out."""


def devices_of(requested: str) -> dict[str, str]:
    """Device type -> "gloo" or "nccl", from what the script asked for, such as "cpu:gloo,cuda:nccl"."""
    if requested == "ft":
        requested = Backend.UNDEFINED
    return {d: str(b) for d, b in BackendConfig(Backend(requested)).get_device_backend_map().items()}


def options_of(devices: dict[str, str]) -> Any:
    """What torch takes where a script gives no options, for a group of these `devices_of`."""
    backend: Any = dist.ProcessGroupGloo
    if "nccl" in devices.values() and dist.is_nccl_available():
        return dist.ProcessGroupNCCL.Options()
    return backend._Options()


class Inner:
    """One group's communicator in one epoch, as a plain `ProcessGroup` over gloo and/or NCCL.

    `ready` and `error` are set once, by the helper thread that opens it. `partial` is set where members
    of the group are away: `members` and `rank` are then those of the ones that are there.
    """

    def __init__(
        self,
        group: GroupId,
        members: tuple[int, ...],
        rank: int,
        devices: dict[str, str],
        timeout: timedelta,
        options: Any,
        epoch: int,
        device: int | None,
        partial: Partial | None = None,
    ) -> None:
        self.partial = partial
        self.group, self.members, self.rank, self.epoch = group, members, rank, epoch
        self.ready = False
        self.error: Exception | None = None
        self.pg: Any = None
        self._together, self._between = 0, Counter[tuple[str, int]]()
        """Operations that were begun here: of all members, and by kind and peer."""
        self.unwaited: dict[int, Any] = {}
        """The backend's works that nobody has waited for or dropped, oldest first."""
        self.connected = False
        """Whether an operation was begun: a device's peers connect in the first."""
        self.wanted = False
        """Whether an operation of the whole group waits for the communicator to be open."""
        self._devices = strict.in_place_of(devices)
        self.timeout, self._options = timeout, options
        self._device = device
        self.asynchronous = asynchronous(devices)
        """Whether operations go on after they were waited for: on a GPU's streams, unseen by the host."""
        self.timed_out = False
        """Whether a time-out of gloo's has closed its connections."""
        self.checked = dist.get_debug_level() == dist.DebugLevel.DETAIL and self.size > 1
        """Whether all members compare what they issue before it begins (TORCH_DISTRIBUTED_DEBUG)."""
        self.beginning = threading.Lock()
        """Held while operations are begun: an abort would free what NCCL has in a group that is open."""
        self.meeting = Series(group)
        """What the members meet by."""
        self.pairs: dict[int, Pair] = {}
        """By peer, communicators for single sends and receives."""
        self._backends: dict[str, Any] = {}
        self._checks: list[Any] = []
        self._host = ""

    @property
    def size(self) -> int:
        """Members of the group."""
        return len(self.members)

    def by_gloo(self, args: Any) -> bool:
        """Whether gloo does an operation with these arguments."""
        if not self.asynchronous:
            return True
        first = _tensor(args)
        return first is not None and self._devices.get(first.device.type) == "gloo"

    def marker(self) -> Callable[[], bool]:
        """Says later whether the device has come to where the caller's stream is now."""
        return stream.event().query

    def apart_for(self, method: str, args: tuple[Any, ...]) -> bool:
        """Whether a single send or receive has a communicator of its own."""
        alone = method != "recv_anysource" and self.size > 2 and self.partial is None
        return alone and not self.by_gloo(args)

    def link_error(self) -> str:
        """What has broken under the communicator while all of its members may live; empty: nothing.

        Only this tells: an operation that it ends counts as completed, and others never end.
        """
        for kind in ("nccl", strict.NAME):
            if (backend := self._backends.get(kind)) is not None:
                error = backend.get_error()
                if error not in _SOUND:
                    return f"{kind} reports {str(error).rpartition('.')[2]}"
        return ""

    def count(self, kind: str, args: tuple[Any, ...], by: int = 1) -> None:
        """An operation is begun (`kind`: see `collectives`). Members that do the same count alike."""
        if kind not in ("send", "recv"):
            self._together += by
        elif len(args) > 2:  # a receive from any source is nobody's in particular
            self._between[kind, args[1]] += by

    @property
    def issued(self) -> dict[Series, int]:
        """Operations that were begun here."""
        roles = self.members if self.partial is None else self.partial.members
        me = self.members[self.rank]
        found = {Series(self.group): self._together} if self._together else {}
        for (kind, peer), many in self._between.items():
            found[Series(self.group, (me, roles[peer]) if kind == "send" else (roles[peer], me))] = many
        return found

    def begin(
        self, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Fill]:
        """Issue an operation: its work, and what is to be done after it, as `Partial.issue` has it."""
        if (pg := self.pg) is None:
            raise EpochChanged(f"epoch {self.epoch} is over")
        if self.partial is not None and method != "monitored_barrier":
            return self.partial.issue(pg, method, kind, args, kwargs)
        return getattr(pg, method)(*args, **kwargs), None

    def connect(self, store: dist.Store, host: str) -> None:
        """Build the communicator; blocks until every member does. RuntimeError if a member is lost.

        `host`: this machine's address for the other members.
        """
        self._host = host
        kinds = set(self._devices.values())
        if strict.NAME in kinds:
            self.pg = self._backends[strict.NAME] = self._strict(store)
            return
        pg: Any = dist.ProcessGroup(store, self.rank, self.size)
        default = "nccl" if "nccl" in kinds else "gloo"
        pg._set_default_backend(Backend.backend_type_map[default])
        pg._set_group_name(str(self.group))
        pg._set_group_desc(f"epoch {self.epoch}")
        self._backends = {kind: self._connect(kind, dist.PrefixStore(f"{kind}/", store)) for kind in kinds}
        shown = {kind: self._checked(kind, dist.PrefixStore(f"{kind} checks/", store)) for kind in kinds}
        for device, kind in self._devices.items():
            pg._register_backend(torch.device(device), Backend.backend_type_map[kind], shown[kind])
        self.pg = pg

    def _connect(self, kind: str, store: dist.Store) -> Any:
        if kind == "gloo":
            return self._gloo(store)
        options = self._options
        options._timeout = self.timeout
        # The streams of communicators come from torch's pool of 32, as those of the script do. In a later
        # epoch one could get a stream that the script computes on, and be in its way.
        options.is_high_priority_stream |= self.epoch > 1
        options.global_ranks_in_group = list(self.members)
        options.group_name = str(self.group)
        nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        nccl._set_sequence_number_for_group()
        if self._device is not None:
            # Here in the helper, because the lazy way blocks the main thread beyond reach of an abort.
            nccl.eager_connect_single_device(torch.device("cuda", self._device))
        return nccl

    def _strict(self, store: dist.Store) -> strict.Communicator:
        def opening(eager: bool) -> Any:
            pg: Any = dist.ProcessGroup(store, self.rank, self.size)
            pg._set_default_backend(Backend.backend_type_map["gloo"])
            gloo = self._gloo(dist.PrefixStore("eager/" if eager else "lazy/", store))
            pg._register_backend(torch.device("cpu"), Backend.backend_type_map["gloo"], gloo)
            self._backends["gloo"] = gloo
            return pg

        fault = strict.fault_of(self.members[self.rank], self.epoch) if self.size > 1 else strict.Fault()
        communicator = strict.Communicator(self.rank, opening, fault)
        if self._device is not None:
            communicator.open(eager=True)
        return communicator

    def _gloo(self, store: dist.Store) -> Any:
        """It would take the address of the machine's name, which may be one that nobody else reaches, or may
        take seconds to look up."""
        backend: Any = dist.ProcessGroupGloo
        how: Any = self.timeout
        if not os.environ.get(INTERFACES):
            how = backend._Options()
            how._timeout, how._devices = self.timeout, [backend.create_device(hostname=self._host)]
        gloo = backend(store, self.rank, self.size, how)
        gloo._set_sequence_number_for_group()
        return gloo

    def _checked(self, kind: str, store: dist.Store) -> Any:
        """The backend of this kind, behind what compares what members issue if that is wanted."""
        if not self.checked:
            return self._backends[kind]
        self._checks.append(self._gloo(store))
        return _ProcessGroupWrapper(self._backends[kind], self._checks[-1])

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations that are issued from now on."""
        self.timeout = timeout
        if self.pg is not None:
            self.pg.set_timeout(timeout)

    def wake(self) -> None:
        """Make every pending operation fail now. From any thread; the communicator is useless afterwards.

        Each communicator in a thread of its own: NCCL's abort waits for the device once it has told its own
        kernels to end, and must not be the reason that others are told later.
        """
        if communicator := self._backends.get(strict.NAME):
            communicator.abort()
        for check in self._checks:
            self._wake_gloo(check)
        if gloo := self._backends.get("gloo"):
            self._wake_gloo(gloo)
        if nccl := self._backends.get("nccl"):
            # No longer: what is being begun may wait for what only this ends.
            begun = self.beginning.acquire(timeout=_BEGINS)
            try:
                nccl.abort()
            except RuntimeError as error:
                log.error(
                    "group %s of epoch %d could not be aborted, and its kernels may hold the GPU: %s. This "
                    "worker is replaced unless it leaves its step by itself",
                    *(self.group, self.epoch, error),
                )
            finally:
                if begun:
                    self.beginning.release()

    def _wake_gloo(self, gloo: Any) -> None:
        """It ignores `abort`, but a receive that times out closes all pairs of its context. A receive from a
        peer whose pair is closed already fails at once, without touching the others: hence the loop."""
        for step in range(1, self.size):
            try:
                peer = (self.rank + step) % self.size
                gloo.recv([torch.zeros(1)], peer, WAKE_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "imed out" in str(error):
                    return

    def finish(self) -> None:
        """Wait for what the device has yet to do; a backend that is only closed would abort it."""
        for kind in ("nccl", strict.NAME):
            if (backend := self._backends.get(kind)) is not None:
                backend.shutdown()

    def close(self) -> None:
        """Give threads, sockets and memory back. May wait for operations that are still running.

        The backends go last: what waits for NCCL's threads is then their own end, which lets go of Python's
        lock, and not the group's, which does not. Those threads may need it.
        """
        if communicator := self._backends.get(strict.NAME):
            communicator.abort()
        self.pg = None
        self._backends, self._checks = {}, []


class Pair(Inner):
    """A communicator of two members of a group, for what they send each other one by one.

    In that of the group all that is not in a batch is in one stream: a member that sends first waits there
    for who sends first as well. torch opens one for each pair where a group was not bound to a device.
    """

    def __init__(self, of: Inner, peer: int) -> None:
        """`peer`: the rank of the other in the group."""
        me, other = of.members[of.rank], of.members[peer]
        ends = (min(me, other), max(me, other))
        options = options_of(of._devices)
        super().__init__(
            of.group, ends, ends.index(me), of._devices, of.timeout, options, of.epoch, of._device
        )
        self.meeting = Series(of.group, ends)
        self._roles, self._between = of.members, of._between

    def begin(
        self, method: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Fill]:
        """Issue a send or a receive; its second argument is the peer's rank in the group."""
        tensors, peer, *rest = args
        there = self.members.index(self._roles[peer])
        return super().begin(method, kind, (tensors, there, *rest), kwargs)


def device_of_thread(devices: Mapping[str, str]) -> int | None:
    """The device that this thread uses, for backends that must know it; None where that is not settled."""
    kinds = strict.in_place_of(devices)
    if strict.NAME in kinds.values():
        return 0
    if kinds.get("cuda") != "nccl" or not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device()


def likely_device(devices: Mapping[str, str]) -> int | None:
    """The device of the local rank, as all launchers have it, for a script that has not said its own."""
    if "nccl" not in devices.values() or not (count := torch.cuda.device_count()):
        return None
    return int(os.environ.get("LOCAL_RANK", "0")) % count


def asynchronous(devices: Mapping[str, str]) -> bool:
    """Whether one of these backends works on a device's stream, which the host runs ahead of."""
    return bool({"nccl", strict.NAME} & set(strict.in_place_of(devices).values()))


def _tensor(args: Any) -> torch.Tensor | None:
    """The first there is in the arguments of an operation."""
    if isinstance(args, torch.Tensor):
        return args
    found = map(_tensor, args) if isinstance(args, (list, tuple)) else ()
    return next((tensor for tensor in found if tensor is not None), None)


class Opener:
    """Opens an epoch's communicators over the epoch's store at `address` ("host:port")."""

    def __init__(
        self,
        epoch: int,
        address: str,
        secret: bytes,
        role: int,
        alive: Callable[[], bool],
        asked: Callable[[Series], None],
        newcomers: Collection[int] = (),
        joined: Callable[[EpochStore], None] = lambda store: None,
    ) -> None:
        """`alive`: whether the epoch is under way. `asked` is given the groups that others open, `joined` the
        store. `newcomers`: roles that have other workers than in the epoch before."""
        self.epoch, self._newcomers = epoch, frozenset(newcomers)
        self._address, self._secret, self._role = address, secret, role
        self._alive, self._asked, self._joined = alive, asked, joined
        self._lock = threading.Lock()
        self._connected: EpochStore | None = None

    def _store(self) -> EpochStore:
        with self._lock:
            if self._connected is None:
                self._connected = connected(self._address, self._secret, self.epoch, self._role, self._alive)
            store = self._connected
        if not self._alive():  # it ended meanwhile, and `close` may have come too early
            store.close()
        return store

    def open(self, inner: Inner, urgent: bool, met: Callable[[], None]) -> None:
        """Meet the other members and connect; `met` is called in between. Raises EpochChanged if the epoch
        ends while waiting."""
        try:
            store = self._store()
            self._meet(store, inner, urgent)
            met()
            inner.connect(dist.PrefixStore(f"{inner.meeting}/", store), store.host)
        except dist.DistStoreError as error:
            if self._alive():
                raise
            over = f"epoch {self.epoch} ended while group {inner.group} was being opened"
            raise EpochChanged(over) from error

    def _meet(self, store: EpochStore, inner: Inner, urgent: bool) -> None:
        # Meeting first means that the blocking part of connecting takes milliseconds.
        newcomers = [role for role in inner.members if role in self._newcomers]
        asks = newcomers if newcomers != [self._role] else []
        store.meet(str(inner.meeting), inner.members, asks, NOW if urgent else PATIENCE)

    def listen(self) -> None:
        """Report the groups that this role is asked to open, until the epoch is over."""
        try:
            store = self._store()
            self._joined(store)
            while True:
                self._asked(store.next_asked())
        except dist.DistStoreError as error:
            # Mostly its node has died, and the next epoch is about to come.
            end = time.monotonic() + STORE_LOST.total_seconds()
            while self._alive():
                if time.monotonic() > end:
                    log.warning("role %d opens no groups that others ask for any more: %s", self._role, error)
                    return
                time.sleep(_POLL)

    def close(self) -> None:
        """The epoch is over: whoever waits at its store is woken."""
        if (store := self._connected) is not None:
            store.close()


def start(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Run something that may block for long, in a thread that keeps nobody from exiting."""
    thread = threading.Thread(target=target, args=args, name=f"ft-{name}", daemon=True)
    thread.start()
    return thread
