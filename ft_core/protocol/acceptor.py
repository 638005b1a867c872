"""Accepts connections: strangers keep no member out, and nobody who is expected is turned away.

Members speak first, and are known by their first bytes. A connection that has not said such takes a
descriptor and next to nobody's time; when there are too many the oldest goes, of the address that has most.
Who has said something else is let into the handshake now and then. Of the handshakes that are pending, those
of members are counted apart, and last as long as a busy machine takes; of the others one that says nothing
more makes room for the next, but not one that has said something that nobody has read yet.

The kernel could keep the silent ones (TCP_DEFER_ACCEPT), but among those whose connections are just being
made, of whom it has few: a thousand a second would leave no place to members there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ft_core.process.descriptors import MAX_GUESTS, REMEDY
from ft_core.protocol import handshake
from ft_core.protocol.connection import Connection
from ft_core.protocol.sockets import is_of_another_user, listener_of, source_of

log = logging.getLogger(__name__)

ANSWER = 3.0
"""Seconds that a member has to answer, once it was greeted, while others wait for its place."""
MAX_KNOWN = 1024
"""Members that may be in the handshake at once: others wait."""
MAX_SILENT = MAX_GUESTS // 4
"""Connections to one listener that have not said what members say first."""
STRANGERS = 100
"""How many of them come into the handshake in a second, if they have said something else."""

_REMEMBERED = 1 << 16
"""Members' first bytes: who says the same again is a stranger."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_SOON = 0.01
_RETRY = 0.1
_ENOUGH = handshake.Handshake.HELLO_BYTES
"""Bytes that a member says first."""
_AT_ONCE = 1024
"""Connections that are accepted before anything else is done."""
_LOOK = 1.0
"""Seconds between two looks for those who have been silent for too long."""


@dataclass(frozen=True)
class _Pending:
    since: float
    source: str
    leave: Callable[[], None]
    unread: Callable[[], bool]


class _PendingHandshakes:
    """The connections that have not shaken hands yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._strangers: dict[int, _Pending] = {}
        self._known: dict[int, _Pending] = {}
        self._heard: dict[bytes, float] = {}
        """What members began with, and when."""

    def room(self) -> int:
        """How many more may come in now."""
        with self._lock:
            if len(self._known) >= MAX_KNOWN and self._slow() is None:
                return 0
            if (free := MAX_GUESTS - len(self._strangers)) > 0:
                return free
            return max(0, free + sum(not guest.unread() for guest in self._strangers.values()))

    @contextlib.contextmanager
    def stay(
        self, source: str, leave: Callable[[], None], unread: Callable[[], bool]
    ) -> Iterator[Callable[[bytes], bool]]:
        """Within this block, `leave` may be called, by any thread, to end the connection, unless it is
        `unread`: what has come of it, nobody has looked at. `source`: where it comes from. What the block is
        given is to be called with what a member has begun with (see `handshake`): from then on it goes last;
        and returns False if somebody has said the same before."""
        number = next(self._numbers)
        guest = _Pending(time.monotonic(), source, leave, unread)

        def known(claim: bytes) -> bool:
            with self._lock:
                if self._is_repeated(claim):
                    return False
                self._strangers.pop(number, None)
                self._known[number] = replace(guest, since=time.monotonic())
                if len(self._known) > MAX_KNOWN and (slow := self._slow()) is not None:
                    self._known.pop(slow).leave()
            return True

        with self._lock:
            self._strangers[number] = guest
            while len(self._strangers) > MAX_GUESTS and (silent := self._silent()) is not None:
                self._strangers.pop(silent).leave()
        try:
            yield known
        finally:
            with self._lock:
                self._strangers.pop(number, None)
                self._known.pop(number, None)

    def _silent(self) -> int | None:
        """The oldest of those who say nothing, from where most of them come: so many connections of one
        machine are in the way of each other, and of nobody else."""
        of_source = Counter(guest.source for guest in self._strangers.values())
        crowded = sorted(self._strangers.items(), key=lambda each: (-of_source[each[1].source], each[0]))
        return next((number for number, guest in crowded if not guest.unread()), None)

    def _slow(self) -> int | None:
        """The oldest member, or who repeats what one has said, that has not answered for a while."""
        until = time.monotonic() - ANSWER
        found = (n for n, guest in self._known.items() if guest.since <= until and not guest.unread())
        return next(found, None)

    def has_heard(self, claim: bytes) -> bool:
        """Whether a member has begun with this."""
        with self._lock:
            return claim in self._heard

    def _is_repeated(self, claim: bytes) -> bool:
        """Whether it was said here before, in the time in which it is worth something."""
        now = time.monotonic()
        while self._heard:
            oldest, at = next(iter(self._heard.items()))
            if at + 2 * handshake.FRESH > now and len(self._heard) < _REMEMBERED:
                break
            del self._heard[oldest]
        if claim in self._heard:
            return True
        self._heard[claim] = now
        return False


pending = _PendingHandshakes()


@dataclass(frozen=True)
class _Outside:
    sock: socket.socket
    since: float
    said: bool
    """Enough to begin with, and it is no member's."""


class _Porch:
    """Connections that have not said what members say first. All that one takes is a descriptor."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._name = listener_of(listener.getsockname())
        self._outside: dict[str, dict[int, _Outside]] = {}
        """Connections that are not members yet, by where they come from, the oldest first."""
        self._may, self._since = float(MAX_GUESTS), time.monotonic()
        """Strangers that may come in, as of that time."""
        self._epoll = select.epoll()
        listener.setblocking(False)
        self._epoll.register(listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._epoll.fileno()

    @property
    def patience(self) -> float:
        """Seconds after which `take` may have something, whatever happens."""
        waiting = any(each.said for outside in self._outside.values() for each in outside.values())
        return 1 / STRANGERS if waiting else _LOOK

    def take(self, most: int, seconds: float) -> list[socket.socket]:
        """So many that may come in, once there are any, or it took so many seconds: members first. Raises
        OSError if one that waits for it cannot be accepted."""
        ready = dict(self._epoll.poll(seconds))
        found: list[socket.socket] = []
        for source, outside in list(self._outside.items()):
            for number in [number for number in outside if number in ready]:
                if len(found) < most:
                    sock = self._remove(source, number)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                    self._look_at(sock, found, is_over=bool(ready[number] & ~select.EPOLLIN))
        failed: OSError | None = None
        if self._listener.fileno() in ready:
            try:
                self._accept(most, found)
            except BlockingIOError:
                pass
            except OSError as error:
                failed = error
                if error.errno in _NO_DESCRIPTORS:
                    self._make_room()
        self._let_strangers_in(most, found)
        self._expire()
        if failed is not None and not found:
            raise failed
        return found

    def _accept(self, most: int, found: list[socket.socket]) -> None:
        for _ in range(_AT_ONCE):
            full = sum(map(len, self._outside.values())) >= MAX_SILENT
            if len(found) == most or (full and not self._make_room()):
                return
            sock, _ = self._listener.accept()
            if is_of_another_user(sock):  # a Unix socket is this user's alone
                sock.close()
            else:
                self._look_at(sock, found, is_over=False)

    def _look_at(self, sock: socket.socket, found: list[socket.socket], is_over: bool) -> None:
        hello = _said(sock)
        if len(hello) < _ENOUGH and is_over:
            sock.close()
        elif len(hello) < _ENOUGH:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _ENOUGH)
            self._epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
            self._keep(sock, said=False)
        elif (claim := handshake.claim_of(self._secret, self._name, hello)) and not pending.has_heard(claim):
            found.append(sock)
        else:
            self._keep(sock, said=True)

    def _keep(self, sock: socket.socket, said: bool) -> None:
        outside = self._outside.setdefault(source_of(sock), {})
        outside[sock.fileno()] = _Outside(sock, time.monotonic(), said)

    def _let_strangers_in(self, most: int, found: list[socket.socket]) -> None:
        """A few, of where the fewest come from: a member whose clock is wrong may be among them, or a node
        that is to be told that its secret is."""
        now = time.monotonic()
        self._may = min(MAX_GUESTS, self._may + (now - self._since) * STRANGERS)
        self._since = now
        for source in sorted(self._outside, key=lambda source: len(self._outside[source])):
            for number in [number for number, each in self._outside[source].items() if each.said]:
                if self._may < 1 or len(found) >= most:
                    return
                self._may -= 1
                found.append(self._remove(source, number))

    def _remove(self, source: str, number: int) -> socket.socket:
        each = self._outside[source].pop(number)
        if not self._outside[source]:
            del self._outside[source]
        if not each.said:
            self._epoll.unregister(each.sock)
        return each.sock

    def _make_room(self) -> bool:
        """The oldest goes of where most come from: so many of one machine are in the way of each other, and
        of nobody else."""
        for source in sorted(self._outside, key=lambda source: -len(self._outside[source])):
            for number, each in self._outside[source].items():
                if each.said or len(_said(each.sock)) < _ENOUGH:
                    self._remove(source, number).close()
                    return True
        return False

    def _expire(self) -> None:
        until = time.monotonic() - handshake.SECONDS
        for source, outside in list(self._outside.items()):
            late = [n for n, each in outside.items() if each.since <= until]
            for number in late:
                if outside[number].said or len(_said(outside[number].sock)) < _ENOUGH:
                    self._remove(source, number).close()

    def close(self) -> None:
        """All of them."""
        self._epoll.close()
        for outside in self._outside.values():
            for each in outside.values():
                each.sock.close()


def _said(sock: socket.socket) -> bytes:
    """What it has said, as much as is enough to begin with."""
    with contextlib.suppress(OSError):
        return sock.recv(_ENOUGH, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return b""


def connections(
    sock: socket.socket, secret: bytes, who: str, over: Callable[[], bool]
) -> Iterator[socket.socket]:
    """Connections made to a listening socket, for a thread, until it fails when `over`."""
    porch: _Porch | None = None
    try:
        while True:
            while not (room := pending.room()):
                time.sleep(_SOON)
            try:
                porch = porch or _Porch(sock, secret)
                found = porch.take(room, porch.patience)
            except OSError as error:
                if over():
                    return
                _say(who, error)
                time.sleep(_RETRY)  # some descriptors come back as connections end
                continue
            yield from found
    finally:
        if porch is not None:
            porch.close()


async def serve(
    sock: socket.socket,
    secret: bytes,
    who: str,
    connected: Callable[[Connection], Coroutine[Any, Any, None]],
) -> None:
    """Serve in an event loop, until cancelled: a task runs `connected` for each connection. Closes `sock`."""
    loop = asyncio.get_running_loop()
    with sock, contextlib.closing(_Porch(sock, secret)) as porch:
        while True:  # those who came in last are pending by now
            while not (room := pending.room()):
                await asyncio.sleep(_SOON)
            await _something(loop, porch)
            try:
                found = porch.take(room, 0)
            except OSError as error:
                _say(who, error)
                await asyncio.sleep(_RETRY)
                continue
            for each in found:
                each.setblocking(False)
            await asyncio.gather(
                *(loop.connect_accepted_socket(lambda: Connection(connected), each) for each in found)
            )


async def _something(loop: asyncio.AbstractEventLoop, porch: _Porch) -> None:
    """Wait until somebody comes or says something, or a while is over."""
    happens = asyncio.Event()
    loop.add_reader(porch.fileno(), happens.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(porch.patience):
                await happens.wait()
    finally:
        loop.remove_reader(porch.fileno())


_warned = False


def _say(who: str, error: OSError) -> None:
    """A connection could not be accepted."""
    global _warned
    if error.errno not in _NO_DESCRIPTORS:
        log.warning("%s could not accept a connection: %s", who, error)
    elif not _warned:
        _warned = True
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error(
            "%s accepts no more connections: all of its %d files and connections are in use (%s). Whoever "
            "wants to connect waits until some are closed. To have more, %s and start the job anew",
            *(who, limit, error.strerror, REMEDY),
        )
