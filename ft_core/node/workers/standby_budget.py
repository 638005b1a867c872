"""How many more workers this machine has memory to spare."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

PLENTY = 4
"""What is free must be this many times what is taken."""
MARGIN = 1.1
"""What is free of a device must be this many times what is taken."""
_CGROUP = Path("/sys/fs/cgroup")


def gpus(dev: Path = Path("/dev")) -> bool:
    """Whether there are any, whose memory each worker would take as well."""
    return any(dev.glob("nvidia[0-9]*")) or (dev / "kfd").exists()


def fits(device: tuple[int, int], there: int) -> bool:
    """Whether a device of which so many bytes (free, all) are free has room for one more like those that are
    there and have the rest."""
    free, total = device
    return free * there > (total - free) * MARGIN


def like(workers: Collection[int], agents: int, proc: Path = Path("/proc")) -> int:
    """How many like these processes the host has memory for, where so many agents on this machine each take
    so many: none where nothing can be told. One where there are no such processes yet, to see what it
    takes."""
    if not workers:
        return 1
    try:
        own = sum(_kilobytes(proc / str(pid) / "status", "RssAnon:") for pid in workers) / len(workers)
        free = _kilobytes(proc / "meminfo", "MemAvailable:")
    except (OSError, ValueError, StopIteration):
        return 0
    free = min([free, *_left_in_cgroup()])
    return int(free / (PLENTY * max(own, 1.0) * max(agents, 1)))


def _kilobytes(path: Path, name: str) -> float:
    return float(next(_values(path.read_text().splitlines(), name)))


def _values(lines: Iterable[str], name: str) -> Iterator[str]:
    return (line.split()[1] for line in lines if line.startswith(name))


def _left_in_cgroup() -> Iterable[float]:
    with contextlib.suppress(OSError, ValueError):
        limit = float((_CGROUP / "memory.max").read_text())  # "max" is no number
        used = float((_CGROUP / "memory.current").read_text())
        reclaimed = _values((_CGROUP / "memory.stat").read_text().splitlines(), "inactive_file")
        yield (limit - used + sum(map(float, reclaimed))) / 1024
