"""An agent speaks to the controller for others.

In a job of many nodes most agents have no connection to the controller, but one to an agent that has. That
passes on what they say, several messages at a time, and what they are told, which the controller sends it
once for all of them. It looks into none of that. It passes on as well that the controller lives: whoever
hears nothing of that for too long asks the controller to be served otherwise (`node.link.uplink`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import acceptor
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.bundle import LARGE, OWN, Bundle, Part, Raw, pack
from ft_core.protocol.codec import encode
from ft_core.protocol.connection import Connection
from ft_core.protocol.messages import RelayLives
from ft_core.protocol.sockets import join_address, listen

_COMPANY = 0.005
"""Seconds that a message waits for others: those of a recovery come at once."""
_LEISURE = 0.1
"""Seconds that a heartbeat waits for others."""
_HEARTBEAT = b'{"type":"Heartbeat"'
_WAIT = 1.0
"""Seconds for which agents wait here for a connection with the controller: then they look for another way."""
_LAST = 2.0
"""Seconds that the others have to take what they are told at the end."""


class Relay:
    """What one agent does for others that it speaks for. Belongs to the event loop that it serves in."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        who: str,
        refused: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._listener = listen(host)
        self.address = join_address(host, self._listener.getsockname()[1])
        """Where it takes the others."""
        self._secret, self._who = secret, who
        self._refused, self._failed = refused, failed
        self._numbers = itertools.count()
        self._others: dict[int, AsyncChannel[bytes]] = {}
        self._send: Callable[[bytes], None] | None = None
        self._there, self._gone = asyncio.Event(), asyncio.Event()
        self._gone.set()
        self._parts: list[Part] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._lives = encode(RelayLives())

    async def serve(self) -> None:
        """Serve other agents until cancelled."""
        await acceptor.serve(self._listener, self._secret, self._who, self._accept)

    def connected(self, send: Callable[[bytes], None]) -> None:
        """The controller serves this agent itself: `send` sends it bytes."""
        self._send = send
        self._there.set()
        self._gone.clear()

    def disconnected(self) -> bool:
        """The controller does not serve this agent any more. The others will have to greet it again. Returns
        whether there are any."""
        self._send, others, self._others = None, self._others, {}
        self._there.clear()
        self._gone.set()
        self._forget()
        for channel in others.values():
            channel.close()
        return bool(others)

    def deliver(self, bundle: Bundle) -> None:
        """What the controller tells the others."""
        for numbers, body in bundle.parts:
            for number in numbers:
                if (channel := self._others.get(number)) is None:
                    continue  # it has left meanwhile
                if body:
                    self._post(channel, body)
                else:
                    del self._others[number]
                    channel.close()
        if not bundle.parts:
            self.hears()

    def hears(self) -> None:
        """The controller is saying something: it may take its time to be here."""
        for channel in self._others.values():
            self._post(channel, self._lives)

    async def close(self) -> None:
        """Let the others hear what the controller says last, once this agent is to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST):
                if self._others:
                    await self._gone.wait()

    # -- the others --------------------------------------------------------------------------------

    async def _accept(self, connection: Connection) -> None:
        number = -1
        try:
            channel = await AsyncChannel.accept(connection, self._secret, Raw())
            async with asyncio.timeout(_WAIT):
                while self._send is None:  # that it is there may be over again by now
                    await self._there.wait()
            number = next(self._numbers)
            self._others[number] = channel
            await channel.each(lambda body: self._pass_on(number, body))
        except (TimeoutError, ConnectionError):
            pass  # the controller is away; it leaves
        except asyncio.CancelledError:
            self._others.pop(number, None)  # this agent ends, which says nothing of the others
        except (AuthenticationError, ProtocolError) as error:
            self._refused(str(error))
        except Exception as error:
            self._failed(error)
        finally:
            if self._others.pop(number, None) is not None:
                self._queue(number, b"", _COMPANY)
            connection.close()

    def _post(self, channel: AsyncChannel[bytes], body: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # its reader notices
            channel.post_encoded(body)

    def _pass_on(self, number: int, body: bytes) -> None:
        if number in self._others and body:
            self._queue(number, body, _LEISURE if body.startswith(_HEARTBEAT) else _COMPANY)

    def _queue(self, number: int, body: bytes, patience: float) -> None:
        self._parts.append(([number], body))
        self._size += OWN + len(body)
        loop = asyncio.get_running_loop()
        due = loop.time() + patience
        if self._size >= LARGE:
            self._flush()
        elif self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due, self._flush)

    def _flush(self) -> None:
        if self._send is not None and self._parts:
            with contextlib.suppress(ConnectionError):  # its reader notices
                self._send(pack(self._parts))
        self._forget()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._parts, self._size = None, [], 0
