"""Which of this machine's addresses state is served on: `--ft-interface`, or what a look at it says.

NCCL chooses alike: a network that can do RDMA, InfiniBand or RoCE, comes before any other, since it is the
one that was built for training. Without one it is the interface that leads to the controller.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ft_core.errors import ConfigError
from ft_core.protocol.sockets import family_of, own_host, seen_by_others

_UP, _LOOPBACK = 0x1, 0x8
_MOST = 16
"""Interfaces that are used at once."""
_INFINIBAND = "32"
"""What the kernel calls its kind of link (ARPHRD_INFINIBAND)."""


@dataclass(frozen=True)
class Interface:
    """One address of an interface that is up."""

    name: str
    address: str
    kind: str
    """`loopback`, `InfiniBand`, `RoCE`, or `other`: Ethernet as a rule."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address}{'' if self.kind == 'other' else f', {self.kind}'})"

    @property
    def rdma(self) -> bool:
        """Whether its network can do RDMA."""
        return self.kind in ("InfiniBand", "RoCE")


class _Address(ctypes.Structure):
    """`struct ifaddrs`, see getifaddrs(3)."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def here(sys: Path = Path("/sys/class/net")) -> list[Interface]:
    """Those of this machine, in the order in which the kernel has them. Raises OSError."""
    return list(dict.fromkeys(_read(sys)))


def _read(sys: Path) -> Iterator[Interface]:
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(first)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        each = first
        while each:
            found, each = each.contents, each.contents.next
            if found.flags & _UP and found.address and (address := _text(found.address)):
                name = found.name.decode(errors="replace")
                yield Interface(name, address, _kind(name, found.flags, sys))
    finally:
        libc.freeifaddrs(first)


def _text(address: int) -> str:
    """An internet address as text; empty for others, and for those that hold on one link alone."""
    family = ctypes.c_ushort.from_address(address).value
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(address + 4, 4))
    if family == socket.AF_INET6:
        text = socket.inet_ntop(socket.AF_INET6, ctypes.string_at(address + 8, 16))
        return "" if ipaddress.ip_address(text).is_link_local else text
    return ""


def _kind(name: str, flags: int, sys: Path) -> str:
    if flags & _LOOPBACK:
        return "loopback"
    try:
        if (sys / name / "type").read_text().strip() == _INFINIBAND:
            return "InfiniBand"
    except OSError:
        pass  # a container without /sys
    return "RoCE" if (sys / name / "device" / "infiniband").is_dir() else "other"


def named(wanted: Sequence[str], interfaces: Sequence[Interface]) -> list[Interface]:
    """Those of `--ft-interface`, in its order. Raises ConfigError if this machine has none of them."""
    found = dict.fromkeys(each for text in wanted for each in interfaces if _is(each, text))
    if not found:
        there = ", ".join(map(str, interfaces)) or "no interface that is up"
        raise ConfigError(
            f"--ft-interface {','.join(wanted)}: {socket.gethostname()} has no such interface that is up and "
            f"has an address; it has {there}. Give names (ib0), patterns (ib*) or subnets (10.1.0.0/16)"
        )
    return list(found)


def _is(interface: Interface, text: str) -> bool:
    try:
        return ipaddress.ip_address(interface.address) in ipaddress.ip_network(text, strict=False)
    except ValueError:
        return fnmatchcase(interface.name, text)


def choose(wanted: Sequence[str], towards: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Where state is served. `towards`: the address by which this machine reaches the controller, whose
    family is taken where there is a choice. Raises ConfigError."""
    by_default = next((each for each in interfaces if each.address == towards), None)
    if wanted:
        found = named(wanted, interfaces)
    elif by_default is None or by_default.kind == "loopback" or by_default.rdma:
        return [by_default or Interface("the interface to the controller", towards, "other")]
    else:
        found = [each for each in interfaces if each.rdma and family_of(each.address) == family_of(towards)]
        found = found or [by_default]
    same = [each for each in found if family_of(each.address) == family_of(towards)] or found
    by_name = {each.name: each for each in reversed(same)}
    return [each for each in same if by_name[each.name] is each][:_MOST]


def chosen(wanted: Sequence[str], controller: str) -> list[Interface]:
    """What an agent of this machine will choose; nothing where it cannot be said yet, as the controller's
    address is not known or there is no way to it. Raises ConfigError if the machine has none of what is
    `wanted`."""
    there = here()
    if wanted:
        named(wanted, there)
    try:
        return choose(wanted, own_host(seen_by_others(controller)), there)
    except (OSError, ValueError):
        return []


def parse(text: str) -> list[str]:
    """The parts of `--ft-interface`. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")] if text else []
    for part in parts:
        if not part:
            raise ConfigError(f"--ft-interface {text!r}: a part of it is empty; give NAME,NAME or a subnet")
        if "/" in part:
            try:
                ipaddress.ip_network(part, strict=False)
            except ValueError as error:
                raise ConfigError(f"--ft-interface {part}: {error}; give a subnet as 10.1.0.0/16") from None
    return parts
