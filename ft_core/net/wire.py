"""Which interface leads to a peer, and how much has left this machine by it, as the kernel and devices count.

The kernel is asked by netlink: its answer is of this process's own network namespace, which /sys may not be.
RDMA passes the kernel by, so ports of InfiniBand and RoCE are asked as well.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from ft_core.protocol.sockets import at_first, family_of

LOOPBACK = "lo"
_SYS = Path("/sys/class/net")

_HEADER = struct.Struct("=IHHII")
"""What each message begins with: length, kind, flags, sequence number, port."""
_ATTRIBUTE = struct.Struct("=HH")
"""What each attribute begins with: length, kind."""
_ROUTE, _GET_ROUTE, _DST, _OIF = struct.Struct("=8BI"), 26, 1, 4
_STATS, _GET_STATS, _LINK_64 = struct.Struct("=BBHII"), 94, 1
_SENT = 24
"""Where the bytes that were sent stand in an interface's counters."""
_ERROR, _REQUEST = 2, 1
_LIMIT = 1.0
"""Seconds; the kernel answers at once."""
_WORDS = 4
"""Bytes in what ports of InfiniBand count."""


def interface_to(host: str) -> str:
    """The name of the interface by which this machine sends to another; `LOOPBACK` to itself. Raises
    OSError."""
    return at_first(host, _interface_to)


def _interface_to(address: str) -> str:
    address, scoped, name = address.partition("%")
    if scoped:
        return name
    family = family_of(address)
    packed = socket.inet_pton(family, address)
    wanted = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _DST) + packed
    body = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0) + wanted
    for kind, value in _ask(_GET_ROUTE, body, _ROUTE.size):
        if kind == _OIF:
            return socket.if_indextoname(struct.unpack("=I", value)[0])
    raise OSError(errno.ENETUNREACH, f"no interface leads to {address}")


class Wire:
    """What leaves by some interfaces, which are one wire to whoever sends over all of them."""

    def __init__(self, names: Sequence[str], sys: Path = _SYS) -> None:
        """Raises OSError if there is no such interface."""
        self.names = tuple(names)
        below = [other for name in names for other in _and_below(name, sys)]
        self._interfaces = [socket.if_nametoindex(name) for name in names]
        ports = "device/infiniband/*/ports/*/counters/port_xmit_data"
        self._ports = sorted(path for name in dict.fromkeys(below) for path in (sys / name).glob(ports))

    def sent(self) -> int:
        """Bytes, since some time. What RDMA and the kernel have both sent by may count twice. Raises
        OSError."""
        by_rdma = sum(int(path.read_text()) * _WORDS for path in self._ports)
        return by_rdma + sum(map(_sent, self._interfaces))


def _and_below(name: str, sys: Path) -> Iterator[str]:
    """An interface, and those that it is made of: a bond's, a VLAN's."""
    yield name
    for path in sorted((sys / name).glob("lower_*")):
        yield from _and_below(path.name.removeprefix("lower_"), sys)


def _sent(interface: int) -> int:
    for kind, value in _ask(_GET_STATS, _STATS.pack(0, 0, 0, interface, _LINK_64), _STATS.size):
        if kind == _LINK_64:
            return int(struct.unpack_from("=Q", value, _SENT)[0])
    raise OSError(errno.ENODEV, "the kernel tells no counters of this interface")


def _ask(kind: int, body: bytes, skip: int) -> Iterator[tuple[int, bytes]]:
    """The attributes, by kind, of what the kernel answers; they come after `skip` bytes. Raises OSError."""
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
    ) as sock:
        sock.settimeout(_LIMIT)
        sock.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST, 0, 0) + body)
        answer = sock.recv(1 << 16)
    length, said, *_ = _HEADER.unpack_from(answer)
    if said == _ERROR:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        raise OSError(number, os.strerror(number))
    at = _HEADER.size + skip
    while at + _ATTRIBUTE.size <= length:
        size, kind = _ATTRIBUTE.unpack_from(answer, at)
        yield kind, answer[at + _ATTRIBUTE.size : at + size]
        at += max(_ATTRIBUTE.size, -(-size // 4) * 4)
