"""Taking connections: strangers keep nobody out.

A connection that has not shaken hands is a guest in the lobby, of whom there are few. A member of the job is
through in a moment; whoever says nothing makes room for the next after a while, the oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ft_core.process.descriptors import MAX_GUESTS, REMEDY
from ft_core.protocol.connection import Connection

log = logging.getLogger(__name__)

STAY = 0.5
"""Seconds that each has for it, whoever else would like to come in."""

_RETRY = 0.1


class _Lobby:
    """The connections that have not shaken hands yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._guests: dict[int, tuple[float, Callable[[], None]]] = {}

    def delay(self) -> float:
        """Seconds until there is room for one more."""
        with self._lock:
            if len(self._guests) < MAX_GUESTS:
                return 0
            since, _ = next(iter(self._guests.values()))
            return max(0.0, since + STAY - time.monotonic())

    @contextlib.contextmanager
    def stay(self, leave: Callable[[], None]) -> Iterator[None]:
        """Within this block, `leave` may be called, by any thread, to end the connection."""
        with self._lock:
            number, now = next(self._numbers), time.monotonic()
            self._guests[number] = now, leave
            oldest, (since, leave) = next(iter(self._guests.items()))
            if len(self._guests) > MAX_GUESTS and now >= since + STAY:
                del self._guests[oldest]
                leave()
        try:
            yield
        finally:
            with self._lock:
                self._guests.pop(number, None)


lobby = _Lobby()


def connections(sock: socket.socket, who: str, over: Callable[[], bool]) -> Iterator[socket.socket]:
    """Connections made to a listening socket, for a thread, until it fails when `over`."""
    while True:
        time.sleep(lobby.delay())
        try:
            found, _ = sock.accept()
        except OSError as error:
            if over():
                return
            _say(who, error)
            time.sleep(_RETRY)  # some descriptors come back as connections end
            continue
        yield found


async def serve(
    sock: socket.socket,
    who: str,
    connected: Callable[[Connection], Coroutine[Any, Any, None]],
) -> None:
    """The same for an event loop, until cancelled: a task runs `connected` for each. Closes `sock`."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    with sock:
        while True:
            await asyncio.sleep(lobby.delay())
            try:
                found, _ = await loop.sock_accept(sock)
            except OSError as error:
                _say(who, error)
                await asyncio.sleep(_RETRY)
                continue
            await loop.connect_accepted_socket(lambda: Connection(connected), found)


_warned = False


def _say(who: str, error: OSError) -> None:
    """A connection could not be accepted."""
    global _warned
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        log.warning("%s could not accept a connection: %s", who, error)
    elif not _warned:
        _warned = True
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error(
            "%s accepts no more connections: all of its %d files and connections are in use (%s). Whoever "
            "wants to connect waits until some are closed. To have more, %s and start the job anew",
            *(who, limit, error.strerror, REMEDY),
        )
