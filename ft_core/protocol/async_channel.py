"""A channel for asyncio: the connection that `channel` has for threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from msgspec import Struct

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import handshake
from ft_core.protocol.acceptor import pending
from ft_core.protocol.codec import MAX_BYTES, Decoder, encode
from ft_core.protocol.connection import Connection
from ft_core.protocol.framing import HEADER, Frames
from ft_core.protocol.handshake import Handshake
from ft_core.protocol.sockets import listener_of, lost, peer_name, source_of, split_address, tune

T = TypeVar("T")


def _at(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have another thread's loop do it, if that still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


class AsyncChannel(Generic[T]):
    """Receives messages of type `T`; a frame with a payload is an error."""

    def __init__(self, connection: Connection, frames: Frames, receives: Decoder[T], peer: str) -> None:
        self.peer = peer
        self._connection = connection
        self._frames = frames
        self._receives = receives
        self._said_all = False

    @classmethod
    async def connect(
        cls,
        address: str,
        secret: bytes,
        receives: Decoder[T],
        timeout: float = handshake.SECONDS,
        patience: float = 0.0,
    ) -> AsyncChannel[T]:
        """Connect, as `Channel.connect` does. `patience`: seconds more that it may take once somebody is
        there, who may have thousands to talk to."""
        connection = Connection()
        try:
            return await cls._connect(connection, address, secret, receives, timeout, patience)
        except TimeoutError:
            if not hasattr(connection, "transport"):  # nobody is there
                raise
            raise TimeoutError(
                f"{address} takes connections, and says nothing that is understood here"
            ) from None

    @classmethod
    async def _connect(
        cls,
        connection: Connection,
        address: str,
        secret: bytes,
        receives: Decoder[T],
        timeout: float,
        patience: float,
    ) -> AsyncChannel[T]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout) as limit:
            if address.startswith("unix:"):
                await loop.create_unix_connection(lambda: connection, address.removeprefix("unix:"))
            else:
                await loop.create_connection(lambda: connection, *split_address(address))
            try:
                limit.reschedule((limit.when() or 0.0) + patience)
                sock = connection.transport.get_extra_info("socket")
                tune(sock, sock.family)
                hands = Handshake(secret, address, listener_of(sock.getpeername()), client=True)
                connection.write(hands.hello)
                connection.write(hands.answer(await connection.exactly(Handshake.HELLO_BYTES)))
                hands.confirm(await connection.exactly(Handshake.PROOF_BYTES))
            except EOFError:
                connection.close()
                raise ConnectionResetError(f"{address} closed the connection during the handshake") from None
            except BaseException:
                connection.close()
                raise
        return cls(connection, hands.frames(), receives, address)

    @classmethod
    async def accept(cls, connection: Connection, secret: bytes, receives: Decoder[T]) -> AsyncChannel[T]:
        """Accept, as `Channel.accept` does; for what `acceptor.serve` calls."""
        sock = connection.transport.get_extra_info("socket")
        peer = peer_name(sock, sock.family)
        hands = Handshake(secret, peer, listener_of(sock.getsockname()), client=False)
        loop, transport = asyncio.get_running_loop(), connection.transport
        about = source_of(sock), lambda: _at(loop, transport.abort), lambda: connection.unread
        try:
            with pending.stay(*about) as known:
                tune(sock, sock.family)
                connection.write(hands.hello)
                async with asyncio.timeout(handshake.SECONDS) as limit:
                    claim = hands.meet(await connection.exactly(Handshake.HELLO_BYTES))
                    if claim and known(claim):
                        limit.reschedule(loop.time() + handshake.PATIENCE)
                    theirs = await connection.exactly(Handshake.PROOF_BYTES)
                try:
                    connection.write(hands.admit(theirs))
                except AuthenticationError:
                    connection.write(handshake.REFUSED)
                    raise
        except (OSError, EOFError) as error:
            connection.close()
            raise AuthenticationError(f"{peer} did not finish the handshake: {error}") from error
        except BaseException:
            connection.close()
            raise
        return cls(connection, hands.frames(), receives, peer)

    @property
    def closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._said_all or self._connection.transport.is_closing()

    @property
    def received(self) -> int:
        """Bytes, of messages that are here and of one that is on its way."""
        return self._connection.received

    @property
    def drained(self) -> bool:
        """Whether all messages were received that have come so far, or no more will be."""
        return self.closing or self._connection.drained

    def post(self, message: Struct) -> None:
        """Queue a message without waiting. Raises ConnectionError if closed or the peer takes nothing."""
        self.post_encoded(encode(message))

    def post_encoded(self, body: bytes) -> None:
        """Send a message that was encoded once for several peers, as `post` does."""
        transport = self._connection.transport
        if self.closing:
            raise ConnectionResetError(f"the connection to {self.peer} is closed")
        if transport.get_write_buffer_size() > MAX_BYTES:
            transport.abort()
            raise ConnectionResetError(
                f"{self.peer} takes nothing, {MAX_BYTES >> 20} MiB wait for it: given up"
            )
        transport.write(self._frames.pack(body))

    async def send(self, message: Struct) -> None:
        self.post(message)
        await self.drain()

    async def drain(self) -> None:
        """Wait until there is room for more. Raises ConnectionError."""
        try:
            await self._connection.drain()
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    async def recv(self) -> T:
        """The next message; may be cancelled and called again. Errors as in `Channel.recv`."""
        while (body := self._next()) is None:
            await self._connection.more()
        return self._receives.decode(body, self.peer)

    async def each(self, handle: Callable[[T], None]) -> NoReturn:
        """Call `handle` with each message where it arrives, until the connection ends. Raises as `recv`, and
        what `handle` does; nothing is taken after that."""
        connection = self._connection
        over: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

        def arrived() -> None:
            try:
                while (body := self._next()) is not None:
                    handle(self._receives.decode(body, self.peer))
            except Exception as error:
                connection.arrived = None
                if not over.done():
                    over.set_exception(error)

        connection.arrived = arrived
        try:
            arrived()
            await over
        finally:
            connection.arrived = None
        raise AssertionError("it ends with an error")

    def _next(self) -> bytearray | None:
        """A message's bytes; None if they are not all here: more are to come. Raises as `recv`."""
        try:
            return self._take()
        except (OSError, EOFError) as error:
            self.close()
            raise self._lost(error) from None
        except (ProtocolError, AuthenticationError):
            self.close()
            raise

    def _take(self) -> bytearray | None:
        connection, frames, end = self._connection, self._frames, HEADER.size
        buffer = connection.buffer
        if len(buffer) >= end:
            header = buffer[:end]
            end += frames.body_bytes(header)
            if len(buffer) >= end:
                body = connection.take(end)[HEADER.size :]
                if frames.open(header, body):
                    raise ProtocolError(f"{self.peer} sent a payload over a control connection")
                return body
        connection.want(end)
        return None

    def _lost(self, error: Exception) -> ConnectionResetError:
        if isinstance(error, OSError):
            return lost(self.peer, error)
        return ConnectionResetError(f"{self.peer} closed the connection")

    def ends_first(self) -> None:
        """Have the other end end first, see `Connection.ends_first`."""
        self._connection.ends_first()

    def say_no_more(self) -> None:
        """Let the peer find, once it has read all, that this was the end."""
        if not self.closing:
            self._said_all = True
            with contextlib.suppress(OSError):  # it has just been reset
                self._connection.transport.write_eof()

    def close(self) -> None:
        self._connection.close()
