"""SIGTERM to a node: its workers get it too, and what they make of it decides what becomes of the node.

A script that handles the signal (Megatron's `--exit-signal-handler`) saves and ends by itself, and a failure
on the way is recovered as ever. Workers that do not handle it die of it, as under torchrun, and their node
leaves the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_core.node.workers import Exit, WorkerPool
from ft_core.process.sigterm import ENDED, GRACE


class Departure:
    """What an agent does about SIGTERM. `end` ends the agent, with its exit code."""

    def __init__(
        self, pool: WorkerPool, post: Callable[[dict[str, Any]], None], end: Callable[[int], None]
    ) -> None:
        self._pool, self._post, self._end = pool, post, end
        self._first: set[int] | None = None
        self._told: set[int] = set()

    def begin(self) -> None:
        """SIGTERM has come; more than once, as Slurm sends it to all processes and `ftrun` repeats it."""
        if self._first is None:
            self._first = {worker.number for worker in self._pool.playing()}
            self.announce()
            self.tell()

    def announce(self) -> None:
        """Let the controller know, also one that was not there when the signal came."""
        if self._first is not None:
            self._post({"type": "leaving"})

    def tell(self) -> None:
        """Pass the signal on. Called again and again, for those who were not ready for it.

        A worker that has just been given its role ignores the signal still, and the successor of a failed
        one must not die of what its predecessor has survived, before its script is where it handles it.
        """
        for worker in self._pool.playing() if self._first is not None else ():
            if worker.number in self._told:
                continue
            if _does("SigCgt", worker.pid) or (
                worker.number in (self._first or ()) and not _does("SigIgn", worker.pid)
            ):
                self._told.add(worker.number)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGTERM)

    def explains(self, ended: Exit) -> bool:
        """Whether a worker has ended because it was told to. The node ends with the last one."""
        if self._first is None or ended.code != -signal.SIGTERM:
            return False
        if self._pool.playing():
            asyncio.get_running_loop().call_later(GRACE, self._end, ENDED)
        else:
            self._end(ENDED)
        return True


def _does(what: str, pid: int) -> bool:
    """Whether process `pid` catches (SigCgt) or ignores (SigIgn) SIGTERM."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(what):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False
