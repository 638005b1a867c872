"""Messages of several agents, or to them, as one: what an agent that speaks for others, their relay, and the
controller say to each other beside the relay's own messages.

The other agents of a relay have numbers there, a new one for each connection. A bundle is `m`; then, as often
as there is something: u32 how many agents, u32 bytes of message, their numbers (u32 each), the message. No
message: the connection with them has ended, or is to end. An empty bundle says that there is nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ft_core.errors import ProtocolError
from ft_core.protocol.codec import Decoder

KIND = b"m"
"""What no message begins with, be it compressed or not."""
LARGE = 256 << 10
"""Bytes of messages from which on a bundle waits for no more: its last message may be large."""
FULL = 1 << 20
"""Bytes of several messages that one bundle has at most, where what is told to many is sent once."""

_PART = struct.Struct("!II")
OWN = _PART.size + 4
"""Bytes that a bundle takes for a message to one, beside the message."""

T = TypeVar("T")
Part = tuple[Sequence[int], bytes]
"""Numbers of agents, and what one of them has said or all of them are told; nothing: that is the end."""


@dataclass(frozen=True)
class Bundle:
    """What one says."""

    parts: list[Part]


def pack(parts: Sequence[Part]) -> bytes:
    """A bundle's bytes."""
    found = [KIND]
    for numbers, body in parts:
        found += _PART.pack(len(numbers), len(body)), struct.pack(f"!{len(numbers)}I", *numbers), body
    return b"".join(found)


def unpack(body: bytes | bytearray, sender: str) -> Bundle:
    """Raises ProtocolError for what is none."""
    view, at = memoryview(body), len(KIND)
    parts: list[Part] = []
    while at < len(view):
        if at + _PART.size > len(view):
            raise ProtocolError(f"{sender} sent a bundle of messages that is torn")
        count, size = _PART.unpack_from(view, at)
        at += _PART.size
        end = at + 4 * count + size
        if end > len(view):
            raise ProtocolError(f"{sender} sent a bundle of messages that is torn")
        numbers = struct.unpack_from(f"!{count}I", view, at)
        parts.append((numbers, bytes(view[end - size : end])))
        at = end
    return Bundle(parts)


class OrBundle(Decoder[T | Bundle]):
    """Makes messages as another does, or bundles."""

    def __init__(self, other: Decoder[T]) -> None:
        self._other = other

    def decode(self, body: bytes | bytearray, sender: str) -> T | Bundle:
        """Decode a message, as `Decoder.decode` does, or a bundle."""
        if body[:1] == KIND:
            return unpack(body, sender)
        return self._other.decode(body, sender)


class Raw(Decoder[bytes]):
    """Leaves messages as they are: they are passed on."""

    def __init__(self) -> None:
        pass

    def decode(self, body: bytes | bytearray, sender: str) -> bytes:
        """Take a message as it is, and raise nothing."""
        return bytes(body)
