"""A standby that starts up a role which another worker plays: it is not seen until it takes its place.

What it prints goes to files of its own, since the script's start-up was shown when the other one did it. It
is the first to be ended where memory is used up, and yields to those who train where that can be undone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ft_core.worker.logs import ERR, OUT, redirected

AHEAD = "ahead"
"""Where its output goes, in its log directory."""
_OOM = Path("/proc/self/oom_score_adj")
_FIRST = 1000
_YIELDING = 19
_MAY_NICE = 23
"""CAP_SYS_NICE: to take a nice value back."""


class StandbyIsolation:
    """This process in the background, from when it is made until `leave`."""

    def __init__(self, directory: Path) -> None:
        """`directory`: of its logs."""
        self._outputs = {stream: os.dup(stream) for stream in (OUT, ERR)}
        for stream in self._outputs:
            redirected(stream, directory / AHEAD)
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._yields = _may_nice()
        if self._yields:
            _renice(_YIELDING)
        self._score = ""
        with contextlib.suppress(OSError):
            self._score = _OOM.read_text()
            _OOM.write_text(str(_FIRST))

    def rests(self) -> None:
        """It does nothing any more until it is needed, and then others wait for it."""
        if self._yields:
            _renice(self._nice)
            self._yields = False

    def leave(self) -> None:
        """It is needed."""
        self.rests()
        if self._score:
            with contextlib.suppress(OSError):
                _OOM.write_text(self._score)
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        for stream, descriptor in self._outputs.items():
            os.dup2(descriptor, stream)
            os.close(descriptor)


def _may_nice() -> bool:
    """Whether a nice value that is given can be taken back: without the privilege it is for good."""
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text().splitlines()
        found = next(line for line in lines if line.startswith("CapEff:"))
        return bool(int(found.split()[1], 16) >> _MAY_NICE & 1)
    return False


def _renice(value: int) -> None:
    """All threads of this process, and those of the processes that it has started: each has its own value,
    and gives it to what it starts."""
    pending = [os.getpid()]
    while pending:
        tasks = Path(f"/proc/{pending.pop()}/task")
        with contextlib.suppress(OSError):
            for task in tasks.iterdir():
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(task.name), value)
                    pending += map(int, (task / "children").read_text().split())
