"""What a process does, seen from outside and without its help: which call of the kernel its threads are in.

/proc says it to whoever may trace a process, such as its ancestors. What is not said is `unknown`.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

Doing = Literal[
    "runs", "blocked", "stopped", "ended", "sleep", "file", "network", "local", "lock", "process", "unknown"
]  # fmt: skip
"""`runs`: on a CPU. `blocked`: in uninterruptible sleep (state D). `stopped`: by a signal, or a debugger.
Else it waits: in a `sleep`, for a `file` to be read, written or found, for the `network`, for another process
of this machine or itself at the other end of a pipe (`local`), for a `lock`, or for a `process` to end."""

_X86: dict[str, tuple[int, ...]] = {
    "fd": (0, 1, 5, 17, 18, 19, 20, 40, 42, 43, 44, 45, 46, 47, 73, 74, 75, 77, 78, 217, 295, 296, 299, 327),
    "path": (2, 4, 6, 21, 76, 80, 82, 83, 84, 85, 86, 87, 89, 137),
    "path at": (257, 258, 262, 263, 264, 265, 267, 269, 316, 332, 334, 437, 439),
    "close": (3,),
    "poll": (7, 271),
    "select": (23, 270),
    "epoll": (232, 281, 441),
    "sleep": (35, 230),
    "process": (61, 247),
    "lock": (202, 449, 455),
}
_ARM: dict[str, tuple[int, ...]] = {
    "fd": (61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 80, 82, 83, 84, 32, 46, 202, 203, 206, 207, 211, 212,
           243, 285),
    "path": (43, 45, 49),
    "path at": (34, 35, 37, 38, 48, 56, 78, 79, 276, 291, 437, 439),
    "close": (57,),
    "poll": (73,),
    "select": (72,),
    "epoll": (22, 441),
    "sleep": (101, 115),
    "process": (95, 260),
    "lock": (98, 449, 455),
}  # fmt: skip
_TABLE = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {})
_CALLS = {number: call for call, numbers in _TABLE.items() for number in numbers}
"""What is known of calls, by number on this machine."""
_NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "anon_inode:", "pipe:", "socket:")
"""What a descriptor is of that is no file of a file system."""
_POLLFD = struct.Struct("=ihh")
_POLLED = 16
"""Descriptors that are looked at, at most, of those that a thread waits for."""
_THREADS = 64
"""The most threads of a process that are looked at."""
_PROCESSES = 64
"""The most processes below another one that are looked at."""
_TEXT = 200
"""Characters of a path or a name."""


class Seen(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a process was seen to do. `what`: the file, or who is at the other end, where that is known."""

    pid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    name: str
    doing: Doing
    what: str = ""


def look_at(pid: int) -> Seen:
    """What its main thread does."""
    name, state = _stat(pid, pid)
    return Seen(pid, name, *_doing(pid, pid, state))


def below(pid: int) -> list[Seen]:
    """The processes that it has started, and those that they have. Where the main thread waits for a lock,
    it is said what another thread does for it."""
    found: list[Seen] = []
    ahead = list(_children(pid))
    while ahead and len(found) < _PROCESSES:
        child = ahead.pop(0)
        ahead += _children(child)
        seen = look_at(child)
        if seen.doing == "lock":
            others = (Seen(child, seen.name, *_doing(child, t, _stat(child, t)[1])) for t in _threads(child))
            seen = next((o for o in others if o.doing in ("runs", "blocked", "file", "network")), seen)
        found.append(seen)
    return found


def _threads(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:_THREADS]
    except OSError:
        return []


def _children(pid: int) -> Iterator[int]:
    for thread in _threads(pid):
        yield from map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def _read(path: str) -> str:
    """Empty: it has ended, or may not be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _stat(pid: int, thread: int) -> tuple[str, str]:
    """Name and state."""
    text = _read(f"/proc/{pid}/task/{thread}/stat")
    if not text:
        return "", "X"
    first, last = text.index("("), text.rindex(")")
    return text[first + 1 : last][:_TEXT], text[last + 2]


def _doing(pid: int, thread: int, state: str) -> tuple[Doing, str]:
    if state in "Tt":
        return "stopped", ""
    if state in "ZX":
        return "ended", ""
    number, *arguments = _read(f"/proc/{pid}/task/{thread}/syscall").split() or [""]
    if state == "R" or number == "running":
        return "runs", ""
    doing, what = (
        _call(pid, int(number), [int(each, 16) for each in arguments]) if number else ("unknown", "")
    )
    return ("blocked", what) if state == "D" else (doing, what)


def _call(pid: int, number: int, arguments: list[int]) -> tuple[Doing, str]:
    match _CALLS.get(number):
        case "fd" | "close":
            return _descriptor(pid, arguments[0])
        case "path":
            return "file", _text(pid, arguments[0])
        case "path at":
            return "file", _text(pid, arguments[1])
        case "poll":
            size = _POLLFD.size * min(arguments[1], _POLLED)
            polled = _memory(pid, arguments[0], size)
            entries = _POLLFD.iter_unpack(polled[: len(polled) // _POLLFD.size * _POLLFD.size])
            return _any_of(pid, (fd for fd, _, _ in entries), bool(arguments[1]))
        case "select":
            bits = int.from_bytes(_memory(pid, arguments[1], 128), "little") if arguments[1] else 0
            below = min(arguments[0], 1024)
            return _any_of(pid, (fd for fd in range(below) if bits >> fd & 1), bool(bits))
        case "epoll":
            lines = _read(f"/proc/{pid}/fdinfo/{arguments[0]}").splitlines()
            fds = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
            return _any_of(pid, fds, True)
        case "sleep":
            return "sleep", ""
        case "process":
            return "process", ""
        case "lock":
            return "lock", ""
        case _:
            return "unknown", ""


def _any_of(pid: int, descriptors: Iterable[int], some: bool) -> tuple[Doing, str]:
    """It waits for one of them. None at all: it waits for time to pass."""
    if not some:
        return "sleep", ""
    found = [_descriptor(pid, fd) for fd, _ in zip(descriptors, range(_POLLED), strict=False) if fd >= 0]
    network = (each for each in found if each[0] == "network")
    return next(network, ("local", "") if found else ("unknown", ""))


def _descriptor(pid: int, fd: int) -> tuple[Doing, str]:
    try:
        raw = os.readlink(os.fsencode(f"/proc/{pid}/fd/{fd}"))  # does not ask the file system that it is of
    except OSError:
        return "unknown", ""
    name = raw.decode(errors="replace")
    if name.startswith("socket:["):
        peer = _peer(pid, name[8:-1])
        return ("network", peer) if peer else ("local", "")
    if name.startswith(_NO_FILES):
        return "local", name[:_TEXT]
    return "file", name[:_TEXT]


def _peer(pid: int, inode: str) -> str:
    """Who is at the other end of an internet connection; empty: it is none, or nobody is."""
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in _read(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            if fields[9] == inode:
                host, port = fields[2].split(":")
                if not int(port, 16):
                    return ""  # it listens
                raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
                return f"{_host(raw)}:{int(port, 16)}"
    return ""


def _host(raw: bytes) -> str:
    if len(raw) == 4:
        return ".".join(map(str, raw))
    if raw[:12] == bytes(10) + b"\xff\xff":
        return ".".join(map(str, raw[12:]))
    return f"[{raw.hex(':', 2)}]"


def _text(pid: int, address: int) -> str:
    """A path in its memory."""
    return _memory(pid, address, _TEXT).partition(b"\0")[0].decode(errors="replace")


def _memory(pid: int, address: int, nbytes: int) -> bytes:
    try:
        with open(f"/proc/{pid}/mem", "rb", 0) as file:
            file.seek(address)
            return file.read(nbytes) or b""
    except (OSError, ValueError, OverflowError):
        return b""
