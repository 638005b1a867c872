"""`ftctl doctor --network`: at what rate a node sends others its state, by the transport that a job has.

All nodes run it at once. Each sends to the next in the list what the roles of a node would, and receives as
much from the one before it, in one process, as an agent does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from ft_core.errors import ConfigError, TransportError
from ft_core.net.transport import TcpTransport
from ft_core.protocol.sockets import join_address, own_host, split_address
from ft_core.state.manifest import CHUNK, Segment, layout
from ft_core.state.replicas import ReplicaStore

PORT = 29555
_ROLES = 8
_NBYTES = 64 << 20
_SECONDS = 5.0
_MOST = 64 << 30
"""Bytes that are sent at most."""
_PATIENCE = 60.0
"""Seconds for the others to come, and to end."""
_AGAIN = 0.2
_QUIET = 3.0
"""Seconds without a byte after which the one before has ended."""
_WARM = 2
"""Versions before anything is counted: both slots of each segment have their memory then."""


@dataclass(frozen=True)
class Measured:
    """What one node has seen."""

    sender: str
    receiver: str
    seconds: float
    bytes_per_second: float
    """Sent."""
    received_per_second: float
    """At the same time, from another."""

    def __str__(self) -> str:
        sent, received = self.bytes_per_second / 1e9, self.received_per_second / 1e9
        return (
            f"{self.sender} -> {self.receiver}: {sent:.3g} GB/s, and {received:.3g} GB/s received meanwhile, "
            f"in {self.seconds:.1f} s (`ftctl plan --measured` takes the least of all nodes, or a file with "
            "what --json prints)"
        )


@dataclass(frozen=True)
class Amount:
    """How much is sent at once, and for how long."""

    roles: int = _ROLES
    nbytes: int = _NBYTES
    seconds: float = _SECONDS
    patience: float = _PATIENCE


def measure(hosts: Sequence[str], secret: bytes, amount: Amount | None = None) -> Measured:
    """Send for some seconds to the host behind this one. Raises ConfigError for hosts that do not work out,
    and TransportError where the next one does not come, or goes."""
    amount = amount or Amount()
    addresses = [_address(host) for host in hosts]
    if len(set(addresses)) < 2:
        raise ConfigError("give two hosts or more, all that take part, this one too: the same list on each")
    store = ReplicaStore()
    at, transport = _listen(addresses, store, secret)
    try:
        return _Sender(transport, join_address(*addresses[(at + 1) % len(addresses)]), amount).run()
    finally:
        transport.close()


def _address(host: str) -> tuple[str, int]:
    try:
        name, port = split_address(host)
    except ValueError:
        name, port = host, PORT
    try:
        return socket.gethostbyname(name), port
    except OSError as error:
        raise ConfigError(f"{host}: {error}; give a name that this machine knows, or an address") from None


def _listen(
    addresses: Sequence[tuple[str, int]], store: ReplicaStore, secret: bytes
) -> tuple[int, TcpTransport]:
    """Where this machine is in the list: the first of its addresses that is free; and what listens there."""
    others = [host for host, _ in addresses if not host.startswith("127.")]
    problem: OSError | None = None
    for at, (host, port) in enumerate(addresses):
        if others and host.startswith("127."):  # many a machine takes its own name for that
            host = own_host(join_address(others[0], port))
        try:
            return at, TcpTransport(store, secret, host=host, port=port)
        except OSError as error:
            problem = error
    raise ConfigError(f"none of these is this machine, with its port free: {problem}")


class _Sender:
    def __init__(self, transport: TcpTransport, to: str, amount: Amount) -> None:
        self._transport, self._to, self._amount = transport, to, amount
        chunks = max(1, amount.nbytes // CHUNK)
        # No chunk is at the same place in two of three versions: what is there already is not sent again.
        data = memoryview(os.urandom((chunks + _WARM) * CHUNK))
        sums = [xxh3_64_intdigest(data[at * CHUNK : (at + 1) * CHUNK]) for at in range(chunks + _WARM)]
        self._contents = [
            (data[first * CHUNK : (first + chunks) * CHUNK], sums[first : first + chunks])
            for first in range(_WARM + 1)
        ]
        name = transport.address  # those of other senders are other segments
        shape = (chunks * CHUNK,)
        self._segments = [
            layout((role,), [(f"{name}-{role}", "uint8", shape, chunks * CHUNK)])
            for role in range(amount.roles)
        ]

    def run(self) -> Measured:
        amount, transport = self._amount, self._transport
        with ThreadPoolExecutor(amount.roles, "ft-rate") as threads:
            self._first(threads)
            for version in range(1, _WARM):
                self._version(threads, version)
            self._until_the_one_before_sends()
            began, sent, received = time.monotonic(), transport.sent_bytes, transport.received_bytes
            version, seconds = _WARM, 0.0
            while seconds < amount.seconds and transport.sent_bytes - sent < _MOST:
                self._version(threads, version)
                version, seconds = version + 1, time.monotonic() - began
            sent, received = transport.sent_bytes - sent, transport.received_bytes - received
        self._wait_for_the_one_before()
        return Measured(transport.address, self._to, seconds, sent / seconds, received / seconds)

    def _first(self, threads: ThreadPoolExecutor) -> None:
        """Until the next host is there."""
        end = time.monotonic() + self._amount.patience
        while True:
            try:
                return self._version(threads, 0)
            except TransportError as error:
                if time.monotonic() > end:
                    raise TransportError(
                        f"{error}. Is the same command run on that host, and is the port open to this one?"
                    ) from error
            time.sleep(_AGAIN)

    def _version(self, threads: ThreadPoolExecutor, version: int) -> None:
        data, sums = self._contents[version % len(self._contents)]

        def push(segment: Segment) -> int:
            return self._transport.push(
                *(self._to, segment, version, data, sums),
                epoch=0,
                gate=lambda: None,
                deadline=self._amount.patience,
            )

        for done in [threads.submit(push, segment) for segment in self._segments]:
            done.result()

    def _until_the_one_before_sends(self) -> None:
        end = time.monotonic() + self._amount.patience
        while not self._transport.received_bytes:
            if time.monotonic() > end:
                raise TransportError(
                    f"the host before this one has sent nothing for {self._amount.patience:.0f} s: is the "
                    "command run there?"
                )
            time.sleep(_AGAIN)

    def _wait_for_the_one_before(self) -> None:
        """It may have begun later."""
        end, seen = time.monotonic() + self._amount.patience, -1
        while self._transport.received_bytes != seen and time.monotonic() < end:
            seen = self._transport.received_bytes
            time.sleep(min(_QUIET, self._amount.patience))
