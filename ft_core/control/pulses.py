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
    sock: socket.socket, secret: bytes, hear: Callable[[Pulse], None], refuse: Callable[[str], None]
) -> Iterator[None]:
    """Within this block `hear` is called with each pulse, and `refuse` with why something is none. Closes
    `sock`."""
    seal, loop = Seal(secret), asyncio.get_running_loop()

    def read() -> None:
        for _ in range(BATCH):
            try:
                datagram, (host, port, *_) = sock.recvfrom(MAX_BYTES + 1)
            except BlockingIOError:
                return
            except OSError as error:
                refuse(f"datagrams cannot be read: {error}")
                return
            try:
                pulse = seal.open(datagram, join_address(host, port))
            except (AuthenticationError, ProtocolError) as error:
                refuse(str(error))
            else:
                hear(pulse)

    with sock:
        loop.add_reader(sock, read)
        try:
            yield
        finally:
            loop.remove_reader(sock)
