"""The communicator inside a process group: it belongs to one epoch and is thrown away with it.

Opening is a rendezvous over the epoch's TCPStore. Every opening runs in a helper thread with a store
client of its own (a client serialises its calls on a mutex), so that nobody who waits for one opening
can hold up another, and an epoch change wakes the waiter although the helper still blocks.

Opening is lazy, but connecting needs every member. A member that would not come by itself, because it
has no business with the group yet, is *asked* through the store and opens in the background: at once
for point-to-point operations, which concern two members only, and after `PATIENCE` for collectives. Workers
that are new in their roles have not used any group: peers who connect theirs again ask those at once.
Without this, two processes that first use two groups in a different order would wait for each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from ft_core.errors import EpochChanged
from ft_core.partial import Partial

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = timedelta(seconds=60)
"""For a connection to the epoch's store, and for one answer of it."""

PATIENCE = 0.5
"""Seconds that an opening waits for members to come by themselves before it asks them."""

POLL_MIN, POLL_MAX, POLL_SHARE = 0.001, 0.25, 0.05
"""A waiting opening looks again after this share of the seconds it has waited, within these bounds. Not
a blocking wait, because torch logs each one that times out."""

WAKE_TAG = 0x7F7
"""Tag of the receive that never matches: it only exists to time out."""


def devices_of(requested: str) -> dict[str, str]:
    """Device type -> "gloo" or "nccl", from what the script asked for, such as "cpu:gloo,cuda:nccl"."""
    if requested == "ft":
        requested = Backend.UNDEFINED
    return {d: str(b) for d, b in BackendConfig(Backend(requested)).get_device_backend_map().items()}


class Inner:
    """One group's communicator in one epoch, as a plain `ProcessGroup` over gloo and/or NCCL.

    `ready` and `error` are set once, by the helper thread that opens it. `partial` is set where members
    of the group are away: `members` and `rank` are then those of the ones that are there.
    """

    def __init__(
        self,
        name: str,
        members: tuple[int, ...],
        rank: int,
        devices: dict[str, str],
        timeout: timedelta,
        options: Any,
        epoch: int,
        cuda_device: int | None,
        partial: Partial | None = None,
    ) -> None:
        self.partial = partial
        self.name, self.members, self.rank, self.epoch = name, members, rank, epoch
        self.ready = False
        self.error: Exception | None = None
        self.pg: Any = None
        self._devices, self._timeout, self._options = devices, timeout, options
        self._cuda_device = cuda_device
        self._backends: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """Members of the group."""
        return len(self.members)

    def connect(self, store: dist.Store) -> None:
        """Build the communicator; blocks until every member does. RuntimeError if a member is lost."""
        pg: Any = dist.ProcessGroup(store, self.rank, self.size)
        kinds = set(self._devices.values())
        default = "nccl" if "nccl" in kinds else "gloo"
        pg._set_default_backend(Backend.backend_type_map[default])
        pg._set_group_name(self.name)
        pg._set_group_desc(f"epoch {self.epoch}")
        self._backends = {kind: self._connect(kind, dist.PrefixStore(f"{kind}/", store)) for kind in kinds}
        for device, kind in self._devices.items():
            pg._register_backend(torch.device(device), Backend.backend_type_map[kind], self._backends[kind])
        self.pg = pg

    def _connect(self, kind: str, store: dist.Store) -> Any:
        if kind == "gloo":
            gloo = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
            gloo._set_sequence_number_for_group()
            return gloo
        options = self._options or dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = list(self.members)
        options.group_name = self.name
        nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        nccl._set_sequence_number_for_group()
        if self._cuda_device is not None:
            # Here in the helper, because the lazy way blocks the main thread beyond reach of an abort.
            nccl.eager_connect_single_device(torch.device("cuda", self._cuda_device))
        return nccl

    def wake(self) -> None:
        """Make every pending operation fail now. From any thread; the communicator is useless afterwards.

        gloo ignores `abort`, but a receive that times out closes all pairs of its context. A receive
        from a peer whose pair is closed already fails at once, without touching the others: hence the
        loop.
        """
        if nccl := self._backends.get("nccl"):
            nccl.abort()
        if gloo := self._backends.get("gloo"):
            for step in range(1, self.size):
                try:
                    peer = (self.rank + step) % self.size
                    gloo.recv([torch.zeros(1)], peer, WAKE_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if "imed out" in str(error):
                        return

    def close(self) -> None:
        """Give threads, sockets and memory back. May wait for operations that are still running."""
        self.pg = None
        self._backends = {}


class Opener:
    """Opens an epoch's communicators over the epoch's store at `address` ("host:port")."""

    def __init__(
        self,
        epoch: int,
        address: str,
        role: int,
        alive: Callable[[], bool],
        asked: Callable[[str], None],
        newcomers: Collection[int] = (),
    ) -> None:
        """`alive`: whether the epoch is under way. `asked` is given the names of groups that others open.
        `newcomers`: roles that have other workers than in the epoch before."""
        self.epoch, self._newcomers = epoch, frozenset(newcomers)
        host, _, port = address.rpartition(":")
        self._host, self._port, self._role = host.strip("[]"), int(port or 0), role
        self._alive, self._asked = alive, asked
        self._idle: list[dist.TCPStore] = []

    @contextmanager
    def _client(self) -> Iterator[dist.TCPStore]:
        try:
            client = self._idle.pop()
        except IndexError:
            client = dist.TCPStore(
                self._host, self._port, None, False, CONNECT_TIMEOUT, wait_for_workers=False
            )
        yield client
        if self._alive():
            self._idle.append(client)

    def open(self, inner: Inner, urgent: bool) -> None:
        """Meet the other members and connect. Raises EpochChanged if the epoch ends while waiting."""
        with self._client() as client:
            self._meet(client, inner, urgent)
            inner.connect(dist.PrefixStore(f"{self.epoch}/{inner.name}/", client))

    def _meet(self, client: dist.Store, inner: Inner, urgent: bool) -> None:
        # Counting first means that the blocking part of connecting takes milliseconds.
        prefix = f"{self.epoch}/{inner.name}"
        if client.add(f"{prefix}/arrived", 1) == inner.size:
            client.set(f"{prefix}/ready", "1")
            return
        self._ask(client, inner, "newcomers", self._newcomers)
        began, asked = time.monotonic(), False
        while self._alive():
            if client.check([f"{prefix}/ready"]):
                return
            waited = time.monotonic() - began
            if not asked and (urgent or waited > PATIENCE):
                self._ask(client, inner, "all", inner.members)
                asked = True
            time.sleep(min(max(POLL_MIN, waited * POLL_SHARE), POLL_MAX))
        raise EpochChanged(f"epoch {self.epoch} ended while group {inner.name} was being opened")

    def _ask(self, client: dist.Store, inner: Inner, whom: str, roles: Collection[int]) -> None:
        wanted = [member for member in inner.members if member in roles and member != self._role]
        if not wanted or client.add(f"{self.epoch}/{inner.name}/asked/{whom}", 1) > 1:
            return
        for member in wanted:
            number = client.add(f"{self.epoch}/asks/{member}", 1)
            client.set(f"{self.epoch}/ask/{member}/{number}", inner.name)

    def listen(self) -> None:
        """Report the groups that this role is asked to open, until the epoch is over."""
        number, began = 1, time.monotonic()
        try:
            with self._client() as client:
                while self._alive():
                    key = f"{self.epoch}/ask/{self._role}/{number}"
                    if client.check([key]):
                        self._asked(client.get(key).decode())
                        number += 1
                    else:
                        waited = time.monotonic() - began
                        eager = self._role in self._newcomers
                        time.sleep(min(max(POLL_MIN, waited * POLL_SHARE), POLL_MAX) if eager else POLL_MAX)
        except RuntimeError as error:
            if self._alive():
                log.warning("role %d: the store of epoch %d is gone: %s", self._role, self.epoch, error)

    def close(self) -> None:
        """Drop the connections that are not in use; the others go with the threads that use them."""
        self._idle.clear()


def start(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Run something that may block for long, in a thread that keeps nobody from exiting."""
    thread = threading.Thread(target=target, args=args, name=f"ft-{name}", daemon=True)
    thread.start()
    return thread
