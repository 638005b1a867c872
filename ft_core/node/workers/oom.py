"""Whether the kernel has ended a process for want of memory, as far as that can be known here.

The cgroup counts how often that has happened in it; the kernel's log, where it may be read, names the pid.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from pathlib import Path

from ft_core.node.devices.kernel_log import PATH, KernelLog

CGROUPS = Path("/sys/fs/cgroup")
_KEPT = 64
"""Pids from there that are remembered, should their ends be noticed later."""
_KILLED = re.compile(r"Killed process (\d+)")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.M)


class OomKiller:
    """What it has done since this object was made."""

    def __init__(self, cgroup: Path | None = None, kernel_log: str = PATH) -> None:
        """`cgroup`: the directory of this process's, if not to be looked for."""
        found = own_cgroup() if cgroup is None else cgroup
        self._files = [found / name for name in ("memory.events", "memory.oom_control")]
        self._count = self._counted()
        self._log = KernelLog(kernel_log)
        self._pids: deque[int] = deque(maxlen=_KEPT)

    def ended(self, pid: int) -> bool:
        """Whether it has ended this process, which died of SIGKILL. A count tells of one process each."""
        self._pids.extend(int(found) for record in self._log.records() for found in _KILLED.findall(record))
        named = pid in self._pids
        counted = self._counted()
        if counted > self._count:
            self._count += 1
            named = True
        return named

    def _counted(self) -> int:
        for file in self._files:
            with contextlib.suppress(OSError):
                if (found := _COUNT.search(file.read_text())) is not None:
                    return int(found[1])
        return 0


def own_cgroup(membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> Path:
    """The directory of the cgroup that limits this process's memory."""
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                found = root / "memory" / path.lstrip("/") if controllers else root / path.lstrip("/")
                if found.is_dir():
                    return found
    return root
