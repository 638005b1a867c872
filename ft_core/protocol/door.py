"""Taking connections: strangers keep nobody out, and nobody who is expected is turned away.

A connection that has not shaken hands is a guest in the lobby, of whom there are few. A member of the job is
known by the first bytes that it sends, and waits elsewhere from then on, as long as a busy machine takes.
Whoever says nothing makes room for the next after a while, the oldest first; whoever has said something that
nobody has read yet does not.
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
from dataclasses import dataclass
from typing import Any

from ft_core.process.descriptors import MAX_GUESTS, REMEDY
from ft_core.protocol.connection import Connection

log = logging.getLogger(__name__)

STAY = 0.5
"""Seconds that each has to say something, whoever else would like to come in."""
MAX_KNOWN = 1024
"""Members that may be in the handshake at once: others wait. Who has overheard what as many have said to this
process's job, and says it again, may have their places for a moment, and once."""

_REMEMBERED = 1 << 14
"""Members' first bytes: who says the same again is a stranger."""
_SOON = 0.01
_RETRY = 0.1


@dataclass(frozen=True)
class _Stranger:
    since: float
    leave: Callable[[], None]
    unread: Callable[[], bool]

    def makes_room(self, now: float) -> bool:
        return now >= self.since + STAY and not self.unread()


class _Lobby:
    """The connections that have not shaken hands yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._strangers: dict[int, _Stranger] = {}
        self._known: set[int] = set()
        self._heard: dict[bytes, None] = {}
        """What members began with."""

    def room(self) -> int:
        """How many more may come in now."""
        with self._lock:
            if len(self._known) >= MAX_KNOWN:
                return 0
            now = time.monotonic()
            leave = sum(guest.makes_room(now) for guest in self._strangers.values())
            return max(0, MAX_GUESTS - len(self._strangers) + leave)

    @contextlib.contextmanager
    def stay(
        self, leave: Callable[[], None], unread: Callable[[], bool]
    ) -> Iterator[Callable[[bytes], bool]]:
        """Within this block, `leave` may be called, by any thread, to end the connection, unless it is
        `unread`: what has come of it, nobody has looked at. What the block is given is to be called with what
        a member has begun with (see `handshake`): from then on it is not called; and returns False if
        somebody has said the same before."""
        number = next(self._numbers)

        def known(claim: bytes) -> bool:
            with self._lock:
                if claim in self._heard:
                    return False
                self._heard[claim] = None
                if len(self._heard) > _REMEMBERED:
                    del self._heard[next(iter(self._heard))]
                self._strangers.pop(number, None)
                self._known.add(number)
            return True

        with self._lock:
            now = time.monotonic()
            self._strangers[number] = _Stranger(now, leave, unread)
            while len(self._strangers) > MAX_GUESTS:
                found = (n for n, guest in self._strangers.items() if guest.makes_room(now))
                if (oldest := next(found, None)) is None:
                    break
                self._strangers.pop(oldest).leave()
        try:
            yield known
        finally:
            with self._lock:
                self._strangers.pop(number, None)
                self._known.discard(number)


lobby = _Lobby()


def connections(sock: socket.socket, who: str, over: Callable[[], bool]) -> Iterator[socket.socket]:
    """Connections made to a listening socket, for a thread, until it fails when `over`."""
    while True:
        while not lobby.room():
            time.sleep(_SOON)
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
        while True:  # those who came in last are in the lobby by now
            while not (room := lobby.room()):
                await asyncio.sleep(_SOON)
            try:
                found = [(await loop.sock_accept(sock))[0]]
            except OSError as error:
                _say(who, error)
                await asyncio.sleep(_RETRY)
                continue
            # All who wait, as far as there is room: a busy loop takes its time to go round.
            with contextlib.suppress(OSError):
                while len(found) < room:
                    found.append(sock.accept()[0])
            for each in found:
                each.setblocking(False)
            await asyncio.gather(
                *(loop.connect_accepted_socket(lambda: Connection(connected), each) for each in found)
            )


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
