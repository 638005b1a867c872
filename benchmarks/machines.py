"""Machines of a job, all of them here: an `ftrun` for each, whose processes are killed together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import read_events


@dataclass
class Machine:
    """One of them."""

    ftrun: subprocess.Popen[bytes]
    job_dir: Path

    @property
    def runs(self) -> bool:
        return self.ftrun.poll() is None

    def children(self) -> list[int]:
        """Those that its `ftrun` has started itself."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                if int(path.read_text().rpartition(")")[2].split()[1]) == self.ftrun.pid:
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> float:
        """As if its power failed. Returns when."""
        self.ftrun.send_signal(signal.SIGSTOP)  # it would start what dies once more
        began = time.monotonic()
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.ftrun.kill()
        self.ftrun.wait()
        return began


def events_of(machines: Iterable[Machine]) -> list[dict[str, Any]]:
    """Of all leaders, in the order of their terms."""
    found = [event for machine in machines for event in read_events(machine.job_dir)]
    return sorted(found, key=lambda event: (event["term"], event["monotonic"]))
