"""Where pulses come in: read a bounded number at a time, so that whoever sends more holds nothing up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol.messages import Pulse
from ft_core.protocol.pulses import MAX_BYTES, Seal
from ft_core.protocol.sockets import join_address

BATCH = 256
"""Datagrams that are read before the event loop looks at its connections again."""


@contextlib.contextmanager
def heard(
    sock: socket.socket, secret: bytes, hear: Callable[[list[Pulse]], None], refuse: Callable[[str], None]
) -> Iterator[None]:
    """Within this block `hear` is called with pulses, all that have come, and `refuse` with why something is
    none. Closes `sock`."""
    seal, loop = Seal(secret), asyncio.get_running_loop()

    def read() -> None:
        pulses: list[Pulse] = []
        for _ in range(BATCH):
            try:
                datagram, (host, port, *_) = sock.recvfrom(MAX_BYTES + 1)
            except BlockingIOError:
                break
            except OSError as error:
                refuse(f"datagrams cannot be read: {error}")
                break
            try:
                pulses.append(seal.open(datagram, join_address(host, port)))
            except (AuthenticationError, ProtocolError) as error:
                refuse(str(error))
        if pulses:
            hear(pulses)

    with sock:
        loop.add_reader(sock, read)
        try:
            yield
        finally:
            loop.remove_reader(sock)
