"""The same connection for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import handshake
from ft_core.protocol.codec import MAX_BYTES, Decoder, encode
from ft_core.protocol.door import lobby
from ft_core.protocol.framing import HEADER, Frames
from ft_core.protocol.handshake import Handshake
from ft_core.protocol.sockets import lost, peer_name, split_address, tune

T = TypeVar("T")


def _at(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have another thread's loop do it, if that still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


class AsyncChannel(Generic[T]):
    """Receives messages of type `T`; a frame with a payload is an error."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: Frames,
        receives: Decoder[T],
        peer: str,
    ) -> None:
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._frames = frames
        self._receives = receives
        self._header: bytes | None = None

    @classmethod
    async def connect(
        cls, address: str, secret: bytes, receives: Decoder[T], timeout: float = handshake.SECONDS
    ) -> AsyncChannel[T]:
        """As `Channel.connect`."""
        async with asyncio.timeout(timeout):
            if address.startswith("unix:"):
                reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                reader, writer = await asyncio.open_connection(*split_address(address))
            try:
                sock = writer.get_extra_info("socket")
                tune(sock, sock.family)
                hands = Handshake(secret, address)
                writer.write(hands.hello)
                writer.write(hands.answer(await reader.readexactly(Handshake.HELLO_BYTES)))
                hands.confirm(await reader.readexactly(Handshake.PROOF_BYTES))
            except asyncio.IncompleteReadError:
                writer.close()
                raise ConnectionResetError(f"{address} closed the connection during the handshake") from None
            except BaseException:
                writer.close()
                raise
        return cls(reader, writer, hands.frames(client=True), receives, address)

    @classmethod
    async def accept(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        receives: Decoder[T],
    ) -> AsyncChannel[T]:
        """As `Channel.accept`; for what `door.serve` calls."""
        sock = writer.get_extra_info("socket")
        peer = peer_name(sock, sock.family)
        hands = Handshake(secret, peer)
        loop, transport = asyncio.get_running_loop(), writer.transport
        try:
            with lobby.stay(lambda: _at(loop, transport.abort)):
                tune(sock, sock.family)
                writer.write(hands.hello)
                async with asyncio.timeout(handshake.SECONDS):
                    hands.meet(await reader.readexactly(Handshake.HELLO_BYTES))
                    theirs = await reader.readexactly(Handshake.PROOF_BYTES)
                try:
                    writer.write(hands.admit(theirs))
                except AuthenticationError:
                    writer.write(handshake.REFUSED)
                    raise
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise AuthenticationError(f"{peer} did not finish the handshake: {error}") from error
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, hands.frames(client=False), receives, peer)

    def post(self, message: Struct) -> None:
        """Queue a message without waiting. Raises ConnectionError if closed or the peer takes nothing."""
        self.post_encoded(encode(message))

    def post_encoded(self, body: bytes) -> None:
        """The same, of a message that was encoded once for several peers."""
        if self._writer.is_closing():
            raise ConnectionResetError(f"the connection to {self.peer} is closed")
        if self._writer.transport.get_write_buffer_size() > MAX_BYTES:
            self._writer.transport.abort()
            raise ConnectionResetError(
                f"{self.peer} takes nothing, {MAX_BYTES >> 20} MiB wait for it: given up"
            )
        self._writer.write(self._frames.pack(body))

    async def send(self, message: Struct) -> None:
        self.post(message)
        await self.drain()

    async def drain(self) -> None:
        """Until there is room for more. Raises ConnectionError."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise lost(self.peer, error) from error

    async def recv(self) -> T:
        """The next message; may be cancelled and called again. Errors as in `Channel.recv`."""
        try:
            if self._header is None:
                self._header = await self._reader.readexactly(HEADER.size)
            body = await self._reader.readexactly(self._frames.body_bytes(self._header))
            if self._frames.open(self._header, body):
                raise ProtocolError(f"{self.peer} sent a payload over a control connection")
        except asyncio.IncompleteReadError:
            self.close()
            raise ConnectionResetError(f"{self.peer} closed the connection") from None
        except OSError as error:
            self.close()
            raise lost(self.peer, error) from error
        except (ProtocolError, AuthenticationError):
            self.close()
            raise
        self._header = None
        return self._receives.decode(body, self.peer)

    def close(self) -> None:
        self._writer.close()
