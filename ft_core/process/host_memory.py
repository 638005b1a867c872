"""How much memory this machine has, and how much of it is free, as far as this process may use it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60


class HostMemory(NamedTuple):
    """In bytes."""

    free: int
    total: int


def room(root: Path = Path("/")) -> HostMemory:
    """What can be had without another losing it; cgroups' limits are counted in."""
    text = (root / "proc/meminfo").read_text()
    meminfo = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+): +(\d+) kB", text, re.M)}
    total, free = meminfo["MemTotal"], meminfo["MemAvailable"]
    for limit, used in _limits(root):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return HostMemory(free, total)


def cgroup(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's cgroup and all above it: any of them may set a limit."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        place = top / path.lstrip("/")
        if not place.is_dir():  # inside a container the path may be the host's
            place = top
        for directory in (place, *place.parents):
            yield directory
            if directory == top:
                break


def number(directory: Path, *names: str) -> int | None:
    """The number in the first file of these that exists; None for `max`."""
    for name in names:
        with contextlib.suppress(OSError):
            text = (directory / name).read_text().strip()
            return int(text) if text.isdigit() else None
    return None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes; what the page cache holds is not counted as used."""
    for directory in cgroup(root, "memory"):
        limit = number(directory, "memory.max", "memory.limit_in_bytes")
        used = number(directory, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        stat = (directory / "memory.stat").read_text() if (directory / "memory.stat").exists() else ""
        cache = re.search(r"^total_inactive_file (\d+)|^inactive_file (\d+)", stat, re.M)
        yield limit, used - (int(cache[1] or cache[2]) if cache else 0)
