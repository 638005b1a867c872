"""Taking connections: strangers keep nobody out, and what runs out says so.

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
from collections.abc import Awaitable, Callable, Iterator

from ft_core.settings import Settings

log = logging.getLogger(__name__)

MAX_GUESTS = 256
"""Connections to this process that may be in the handshake at once."""

STAY = 0.5
"""Seconds that each has for it, whoever else would like to come in."""

_RETRY = 0.1
_ENOUGH = 1 << 20
"""Files: some programs go through all numbers up to the limit, and that may be a billion."""
_OWN = 128
"""Files and connections that a process has by itself."""
_PER_WORKER = 32
"""Of an agent: snapshots and replicas in memory, logs, connections to other agents."""
_REMEDY = "raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd, `docker run --ulimit nofile=...`)"


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
    connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
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
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader, connected)
            await loop.connect_accepted_socket(lambda it=protocol: it, found)  # type: ignore[misc]


# -- descriptors -----------------------------------------------------------------------------------


def raise_limit() -> int:
    """Let this process, and those that it starts, open as many files as the system allows: how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def check_limit(who: str, settings: Settings) -> None:
    """Raise the limit, and say so if it does not suffice for the job.

    The hungriest are the controller, to which all nodes connect, and the agent of role 0, to which all
    workers do, in two epochs for a moment.
    """
    limit, nodes, world = raise_limit(), settings.nnodes + settings.spares, settings.world_size
    needed = _OWN + MAX_GUESTS + max(nodes, 2 * world + _PER_WORKER * (settings.nproc_per_node + 1))
    if limit < needed:
        log.warning(
            "%s may have %d files and connections open, and may need %d with %d roles on %d nodes. When they "
            "run out, nodes and workers wait for each other: %s",
            *(who, limit, needed, world, nodes, _REMEDY),
        )


_told = False


def _say(who: str, error: OSError) -> None:
    """A connection could not be accepted."""
    global _told
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        log.warning("%s could not accept a connection: %s", who, error)
    elif not _told:
        _told = True
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error(
            "%s accepts no more connections: all of its %d files and connections are in use (%s). Whoever "
            "wants to connect waits until some are closed. To have more, %s and start the job anew",
            *(who, limit, error.strerror, _REMEDY),
        )
