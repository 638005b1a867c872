"""Pulses as datagrams: small words that a node lives, without a connection, of which any may be lost.

A datagram is magic, 32-byte HMAC-SHA256 of the message under a key that is for nothing else, then the message
(`codec`). Whoever repeats one changes nothing: a pulse says to which controller it was sent, and each of a
node's has a higher number than those before it.
"""

from __future__ import annotations

import contextlib
import hmac
import socket

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import handshake
from ft_core.protocol.codec import encode
from ft_core.protocol.messages import FROM_PULSE, Pulse
from ft_core.protocol.sockets import at_first, family_of, split_address

MAX_BYTES = 1024
"""The most bytes of a datagram."""

_MAGIC = b"FTP1"
_HEAD = len(_MAGIC) + 32
_BUFFER = 8 << 20
"""Bytes that the kernel is to keep while nobody reads; as a rule it keeps less (`net.core.rmem_max`)."""


class Seal:
    """The seal of one job's pulses."""

    def __init__(self, secret: bytes) -> None:
        if not secret:
            raise ValueError("the job's secret is empty: every process could join")
        self._key = hmac.digest(secret, b"pulses of version %d" % handshake.VERSION, "sha256")

    def pack(self, pulse: Pulse) -> bytes:
        """A datagram. Raises ProtocolError for one that is too large."""
        body = encode(pulse)
        if len(body) + _HEAD > MAX_BYTES:
            raise ProtocolError(f"a pulse of {len(body)} bytes is over the limit of {MAX_BYTES - _HEAD}")
        return _MAGIC + hmac.digest(self._key, body, "sha256") + body

    def open(self, datagram: bytes, sender: str) -> Pulse:
        """What it says. Raises AuthenticationError, or ProtocolError, unless it is one of this job's."""
        body = datagram[_HEAD:]
        if not datagram.startswith(_MAGIC) or not body or len(datagram) > MAX_BYTES:
            raise ProtocolError(f"a datagram from {sender} is no pulse of this protocol")
        if not hmac.compare_digest(datagram[4:_HEAD], hmac.digest(self._key, body, "sha256")):
            raise AuthenticationError(
                f"a datagram from {sender} is of nobody who knows this job's secret, or of another version"
            )
        return FROM_PULSE.decode(body, sender)


def receiver(address: str, port: int) -> socket.socket:
    """A socket for those that are sent to this address of the machine. Raises OSError."""
    sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        with contextlib.suppress(OSError):  # which only a privileged process may
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), _BUFFER)
        sock.bind((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


def sender(address: str) -> socket.socket:
    """A socket whose datagrams go there. Raises OSError."""
    host, port = split_address(address)
    return at_first(host, lambda found: _sender(found, port))


def _sender(address: str, port: int) -> socket.socket:
    sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock
