"""What a worker that takes over must not have before its predecessors have let go of it: ports that a script
chooses, a GPU's memory. All else it can begin with while the kernel still frees theirs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ft_core.process import ending

log = logging.getLogger(__name__)

LIMIT = 20.0
"""Seconds."""
_POLL = 0.005
_LISTENS, _UNCONNECTED = "0A", "07"
"""States in /proc/net."""


def wait(
    role: int,
    pids: Iterable[int],
    to_the_end: bool,
    limit: float = LIMIT,
    holds_port: Callable[[int], bool] | None = None,
) -> bool:
    """Until those of `pids` that are ending are gone, or, unless it must be `to_the_end`, hold no port that a
    script may have chosen. Whether it was so within `limit` seconds."""
    holds = has_chosen_port if holds_port is None else holds_port
    began = time.monotonic()
    for pid in pids:
        while ending.status(pid) is not None and (to_the_end or holds(pid)):
            if time.monotonic() - began > limit:
                log.warning(
                    "role %d: after %.0f s the kernel has not ended process %d, a former worker, to its end: "
                    "the script may find a port taken, or a device full",
                    *(role, limit, pid),
                )
                return False
            time.sleep(_POLL)
    return True


def has_chosen_port(pid: int) -> bool:
    """Whether a process may have a port that the kernel has not chosen for it. Where its open files cannot be
    seen, as when they are being closed, or it is gone between two looks, it may."""
    try:
        directories = list(Path(f"/proc/{pid}/task").glob("*/fd"))
        links = {os.readlink(path) for directory in directories for path in directory.iterdir()}
        return not links or not links.isdisjoint(_chosen())
    except OSError:
        return True


def _chosen() -> set[str]:
    """Sockets that have one, as /proc/PID/fd names them."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = set()
    for name, state in ("tcp", _LISTENS), ("tcp6", _LISTENS), ("udp", _UNCONNECTED), ("udp6", _UNCONNECTED):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:  # there is no IPv6
            continue
        for line in lines:
            _, local, _, at, _, _, _, _, _, inode, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            if at == state and not first <= port <= last:
                found.add(f"socket:[{inode}]")
    return found
