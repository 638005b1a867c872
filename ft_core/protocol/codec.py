"""Messages as bytes and back: the one place that knows their format, and how large they may be.

JSON by msgspec, strict: nothing is converted, nothing is left out, nothing is ignored. Not msgpack: it would
save a quarter of the bytes of messages that are small anyway (what is large is a payload, see `framing`), and
it can express what no message means, such as NaN, a date, or a map whose keys are of any kind. Those that say
so (`Message.compressed`) are compressed.
"""

from __future__ import annotations

import zlib
from typing import Any, Generic, TypeVar

import msgspec

from ft_core.errors import ProtocolError

MAX_BYTES = 64 << 20
"""The most that is sent as one. A message takes up to 64 times as much once it is decoded. The checksums of a
256 GiB segment take about 6 MiB."""
BESIDE = 1 << 20
"""The part of these that a message leaves to others that are sent with it (see `bundle`)."""

_ZLIB = b"x"
"""What is compressed begins with it, and JSON does not."""
_UNPACKED = 32
"""A compressed message may become so many times as large: more than a table of nodes ever does; and never
larger than one that is not."""
_MAX_TEXT = 300
"""Characters of what is said of a message that is refused: its sender has chosen some of them."""

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """A message's bytes. Raises ProtocolError for one that is too large."""
    body = msgspec.json.encode(message)
    if getattr(message, "compressed", False):
        body = zlib.compress(body, 1)
    if len(body) > MAX_BYTES - BESIDE:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_BYTES - BESIDE}")
    return body


class Decoder(Generic[T]):
    """Makes messages of type `T` of bytes: `Decoder[ToWorker](ToWorker)`. For any number of threads."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.json.Decoder(kinds)

    def decode(self, body: bytes | bytearray, sender: str) -> T:
        """Raises ProtocolError, and nothing else, for what is no message, or none that is expected here."""
        try:
            if body[:1] == _ZLIB:
                unpacker = zlib.decompressobj()
                body = unpacker.decompress(body, min(_UNPACKED * len(body), MAX_BYTES))
                if not unpacker.eof:
                    raise ValueError("it is torn, or too large")
            message: T = self._decoder.decode(body)
        except (ValueError, RecursionError, zlib.error) as error:
            raise ProtocolError(f"{sender} sent what is no message here: {_short(error)}") from None
        return message


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
