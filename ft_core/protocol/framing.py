"""Frames: a message, and a payload if there is one, which cannot be forged, altered, repeated or dropped.

A frame is magic, u32 length of the message, u64 length of the payload, 32-byte HMAC-SHA256 over (sequence
number, both lengths, message) under the direction's key; then the message (`codec`); then the payload's
raw bytes. The *payload* is not under the HMAC, which would cost more CPU than the transfer itself: the
caller puts its xxh3_64 checksum into the message, which finds every accident but not an attacker on the
path. Where the network is not the job's own, encrypt it below (WireGuard, IPsec).
"""

from __future__ import annotations

import hmac
import struct

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol.codec import MAX_BYTES

HEADER = struct.Struct("!4sIQ32s")

_MAGIC = b"FTW1"
_AUTHENTICATED = struct.Struct("!QIQ")


class Frames:
    """Packs and opens the frames of one connection."""

    def __init__(self, send_key: bytes, receive_key: bytes, peer: str) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._peer = peer

    def pack(self, body: bytes, payload_bytes: int = 0) -> bytes:
        """A frame but for its payload."""
        known = _AUTHENTICATED.pack(self._sent, len(body), payload_bytes)
        mac = hmac.digest(self._send_key, known + body, "sha256")
        self._sent += 1
        return HEADER.pack(_MAGIC, len(body), payload_bytes, mac) + body

    def body_bytes(self, header: bytes | bytearray) -> int:
        """How many bytes of message follow a header. Raises ProtocolError before there are too many."""
        magic, length, _, _ = HEADER.unpack(header)
        if magic != _MAGIC:
            raise ProtocolError(f"{self._peer} sent something that is not a frame")
        if length > MAX_BYTES:
            raise ProtocolError(
                f"{self._peer} announced a message of {length} bytes, the limit is {MAX_BYTES}"
            )
        return int(length)

    def open(self, header: bytes | bytearray, body: bytes | bytearray) -> int:
        """How many bytes of payload follow. Raises AuthenticationError unless the frame is the peer's."""
        _, length, payload_bytes, mac = HEADER.unpack(header)
        known = _AUTHENTICATED.pack(self._received, length, payload_bytes)
        if not hmac.compare_digest(mac, hmac.digest(self._receive_key, known + body, "sha256")):
            raise AuthenticationError(f"a frame from {self._peer} was altered on the way, or is not from it")
        self._received += 1
        return int(payload_bytes)
