"""A connection of an event loop: what has come and was not taken; `async_channel` makes messages of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from ft_core.protocol.sockets import ends_first, readable

ROOM = 128 << 10
"""Bytes that wait here for whoever takes them, beyond what is waited for. The rest stays with the sender."""

_tasks: set[asyncio.Task[None]] = set()


class Connection(asyncio.Protocol):
    """Use from its event loop alone."""

    transport: asyncio.Transport

    def __init__(self, connected: Callable[[Connection], Coroutine[Any, Any, None]] | None = None) -> None:
        """`connected` is run by a task, which closes it at last."""
        self._connected = connected
        self.buffer = bytearray()
        """What has come; whoever takes some removes it."""
        self.received = 0
        """Bytes, ever."""
        self._wanted = 0
        self.arrived: Callable[[], None] | None = None
        """Called when there are as many, and at the end, instead of waking who waits in `more`."""
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._end: Exception | None = None
        """Why no more will come."""
        self._lost = False
        self._writable = asyncio.Event()
        self._last: socket.socket | None = None

    # -- what the loop says ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._writable.set()
        if self._connected is not None:
            task = asyncio.get_running_loop().create_task(self._connected(self))
            _tasks.add(task)
            task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.transport.close()
            context = {"message": "nobody has taken this error of a connection", "exception": error}
            task.get_loop().call_exception_handler(context)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.received += len(data)
        if len(self.buffer) >= self._wanted:
            self._tell()
        if len(self.buffer) > ROOM + self._wanted and not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self._end = self._end or EOFError("it was closed")
        self._tell()
        return True  # it can still be told why

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._last is not None:
            self._last.close()
        self._end = self._end or exc or EOFError("it was closed")
        self._tell()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _tell(self) -> None:
        if self.arrived is not None:
            self.arrived()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what whoever uses it asks for -------------------------------------------------------------

    @property
    def unread(self) -> bool:
        """Whether what is wanted is here, or may be, and nobody has looked at it: the loop may have much to
        do."""
        wanted = len(self.buffer) >= self._wanted
        return wanted or (not self.buffer and readable(self.transport.get_extra_info("socket").fileno()))

    @property
    def drained(self) -> bool:
        """Whether all that has come so far was taken, but for a part of what is wanted."""
        sock = self.transport.get_extra_info("socket")
        return len(self.buffer) < self._wanted and not readable(sock.fileno())

    def ends_first(self) -> None:
        """Should this process be killed, the peer is to hear of it before its memory files are freed."""
        self._last = ends_first(self.transport.get_extra_info("socket"))

    def take(self, count: int) -> bytearray:
        """The first `count` bytes of `buffer`, which has them."""
        taken = self.buffer[:count]
        del self.buffer[:count]
        self._wanted = 0
        return taken

    def want(self, count: int) -> None:
        """`buffer` has less than `count` bytes: have more come. Raises EOFError, or OSError, if that will not
        be."""
        self._wanted = count
        if self._end is not None:
            raise self._end
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    async def more(self) -> None:
        """Wait until what is wanted is there, or will not be. May be cancelled."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def exactly(self, count: int) -> bytes:
        """Receive so many bytes. Raises as `want`."""
        while len(self.buffer) < count:
            self.want(count)
            await self.more()
        return bytes(self.take(count))

    async def drain(self) -> None:
        """Wait until there is room for more to be written. Raises EOFError or OSError once it has ended."""
        await self._writable.wait()
        if self._lost and self._end is not None:
            raise self._end

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def close(self) -> None:
        """What was written is sent before."""
        self.transport.close()
