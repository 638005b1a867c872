"""Addresses and sockets: listening, tuning, and reading and writing with a limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

BACKLOG = 4096
"""Connections that wait until they are accepted: as many as a system allows, as a rule."""

_CREDENTIALS = struct.Struct("3i")
"""What is known of a Unix socket's peer: pid, user, group."""

ENDS_FIRST = 4096
"""The number of a descriptor beyond those of an agent's memory files."""
ENDS_BEFORE = 2 * ENDS_FIRST
"""And of one beyond those that end first."""


_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH, errno.EHOSTUNREACH)
"""Errors of an address that this machine does not have, or has no way to."""


_OTHERS = ("192.0.2.1:9", "[2001:db8::1]:9")
"""Addresses of no machine, which are kept for documents: what goes to others would go there. Nothing does."""


def family_of(address: str) -> socket.AddressFamily:
    """The family of an internet address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def addresses_of(host: str) -> list[str]:
    """The addresses of a name, or the address that it is. Raises OSError.

    IPv4 comes first where a name has both: all nodes are to take the same.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(name[0]) for _, _, _, _, name in found)
    return sorted(addresses, key=lambda address: family_of(address) == socket.AF_INET6)


def at_first(host: str, use: Callable[[str], T]) -> T:
    """What `use` makes of the first of a host's addresses that is of use on this machine. Raises OSError."""
    *others, last = addresses_of(host)
    for address in others:
        try:
            return use(address)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
    return use(last)


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket on this interface alone; port 0 picks a free one (see `getsockname`).

    For "unix:/path" as `host`, one there.
    """
    if host.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(host.removeprefix("unix:"))
        sock.listen(BACKLOG)
        return sock

    def at(address: str) -> socket.socket:
        return socket.create_server((address, port), family=family_of(address), backlog=BACKLOG)

    return at_first(host, at)


def ends_first(sock: socket.socket, number: int = ENDS_FIRST) -> socket.socket | None:
    """Should this process be killed, this is to end before its memory files are freed, 0.1 s a GB or more.
    The kernel ends what it has open from the highest number down. Returns what has that number, to be closed
    with `sock`; None: so many files this process may not have, or `sock` is closed."""
    with contextlib.suppress(OSError, ValueError):
        return socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, number))
    return None


def readable(descriptor: int) -> bool:
    """Whether something has come that was not read; not if it is closed."""
    poll = select.poll()
    if descriptor >= 0:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def reserve(host: str) -> socket.socket:
    """A free port while this socket is open: nobody is given it by chance, and who asks for it gets it. At
    present nobody uses it for datagrams either."""
    return at_first(host, _reserve)


def _reserve(address: str) -> socket.socket:
    while True:
        sock = socket.socket(family_of(address))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, 0))
        except OSError:
            sock.close()
            raise
        with socket.socket(sock.family, socket.SOCK_DGRAM) as datagrams:
            try:
                datagrams.bind((address, sock.getsockname()[1]))
            except OSError:
                sock.close()
                continue
        return sock


def own_host(towards: str) -> str:
    """This machine's address for whoever is at "host:port"; loopback stays loopback. Raises OSError."""
    host, port = split_address(towards)

    def at(address: str) -> str:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # sends nothing; the kernel picks the interface
            return str(probe.getsockname()[0])

    return at_first(host, at)


def only_here(host: str) -> str:
    """The loopback address that a name has, if it has no other on this machine: many systems map a machine's
    own name to one in /etc/hosts. Empty for others, and for those that mean it. Raises OSError."""
    addresses = addresses_of(host)
    if host in ("localhost", *addresses) or not all(
        ipaddress.ip_address(each).is_loopback for each in addresses
    ):
        return ""
    return addresses[0]


def seen_by_others(address: str) -> str:
    """An address of this machine or another, as all machines may use it: see `only_here`. As it is where
    there is no way to others, or the name is not known."""
    host, port = split_address(address)
    with contextlib.suppress(OSError):
        for others in _OTHERS if only_here(host) else ():
            with contextlib.suppress(OSError):
                return join_address(own_host(others), port)
    return address


def join_address(host: str, port: int) -> str:
    """ "host:port", or "[v6]:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise ValueError(f"not an address: {address!r}; expected host:port or unix:/path")
    return host.strip("[]"), int(port)


def source_of(sock: Any) -> str:
    """Where a connection comes from: an address; of IPv6, what one machine has; or this machine."""
    if sock.family == socket.AF_UNIX:
        return "this machine"
    with contextlib.suppress(OSError, ValueError):
        address = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_loopback:
            return "this machine"
        return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)
    return "nowhere"


def listener_of(name: Any) -> bytes:
    """What both ends of a connection take its listener for, by `getsockname` and `getpeername`: the port,
    since its address may be another from outside; or the path."""
    if isinstance(name, tuple):
        return b"%d" % name[1]
    return bytes(name) if isinstance(name, bytes) else os.fsencode(name)


def is_of_another_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is neither this user's nor root's."""
    if sock.family != socket.AF_UNIX:
        return False
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] not in (0, os.geteuid())


def as_bytes(data: bytes | memoryview) -> memoryview:
    """A flat view of single bytes on contiguous memory, of any format and shape, empty ones too."""
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


GONE_MS = 25_000


def tune(sock: Any, family: int) -> None:
    """No delay for small frames, and a vanished node ends a connection within some 25 s, idle or not."""
    if family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Otherwise what is sent into a partition is tried for a quarter of an hour, ever more seldom.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
    if _on_loopback(sock):
        # Within a machine nothing is congested; BBR, where that is the default, paces by timers all the same.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _on_loopback(sock: Any) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.ip_address(sock.getpeername()[0]).is_loopback
    return False


def peer_name(sock: Any, family: int) -> str:
    """The other end's name, for messages."""
    try:
        if family == socket.AF_UNIX:
            return f"unix:{sock.getsockname() or sock.getpeername()}"
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that is gone"
    return join_address(host, port)


# The sockets stay in blocking mode and the time-outs are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): a chunk is
# then one system call with the GIL released, and sending and receiving threads have time-outs of their own.
def _set_kernel_timeout(sock: socket.socket, option: int, end: float | None) -> None:
    left = 0.0
    if end is not None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        left = max(left, 1e-3)  # zero would mean forever
    seconds = int(left)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, int((left - seconds) * 1e6)))


def lost(peer: str, error: OSError) -> ConnectionResetError:
    """The error that says that a connection ended, and of what."""
    return ConnectionResetError(f"connection to {peer} lost: {error.strerror or error}")


def receive(sock: socket.socket, view: memoryview, end: float | None, peer: str) -> int:
    """Receive at least one byte into `view`, as many as come until it is full or `end` (time.monotonic) is
    there."""
    try:
        _set_kernel_timeout(sock, socket.SO_RCVTIMEO, end)
        count = sock.recv_into(view, len(view), socket.MSG_WAITALL)
    except BlockingIOError:
        raise TimeoutError(f"nothing came from {peer} in time") from None
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise TimeoutError(f"nothing came from {peer} in time") from None
        raise lost(peer, error) from error
    if not count:
        raise ConnectionResetError(f"{peer} closed the connection")
    return count


def receive_exactly(sock: socket.socket, count: int, end: float | None, peer: str) -> bytes:
    """Receive so many bytes before `end`."""
    data = memoryview(bytearray(count))
    have = 0
    while have < count:
        have += receive(sock, data[have:], end, peer)
    return bytes(data)


def send_all(sock: socket.socket, data: memoryview, end: float | None, peer: str, flags: int = 0) -> None:
    """All of `data`, before `end`."""
    while len(data):
        try:
            _set_kernel_timeout(sock, socket.SO_SNDTIMEO, end)
            data = data[sock.send(data, flags) :]
        except BlockingIOError:
            raise TimeoutError(f"{peer} took nothing in time") from None
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise TimeoutError(f"{peer} took nothing in time") from None
            raise lost(peer, error) from error


def shut(sock: socket.socket) -> None:
    """Wake whoever is blocked in it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
