"""Has this node checked in a process of its own, for which the agent's event loop does not wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from ft_core.node.admission import examination
from ft_core.node.admission.examination import Examination
from ft_core.protocol.messages import NodeCheck, Soundness

LIMIT = 14.0
"""Seconds that all checks may take together. What has not ended by then is unknown."""
_TAKEN_BACK = 3.0


async def examined(start: Callable[[], BaseProcess], path: Path, limit: float = LIMIT) -> Examination:
    """What `start`, which begins `examination.main`, has written to `path` by its end. Ends it if need be."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    process = start()
    loop.add_reader(process.sentinel, ended.set)
    how = ""
    try:
        async with asyncio.timeout(limit):
            await ended.wait()
        process.join()
        how = f"its process ended with {process.exitcode}"
    except TimeoutError:
        how = f"it did not end within {limit:g} s"
    except asyncio.CancelledError:
        loop.remove_reader(process.sentinel)
        _kill(process)
        raise
    if not ended.is_set():
        await _killed(process, ended)
    loop.remove_reader(process.sentinel)
    found = await asyncio.to_thread(examination.read, path)
    if not found.complete:
        name = found.begun or "start"
        found.checks.append(NodeCheck(name, Soundness.UNKNOWN, "", f"it cannot be made: {how}"))
    return found


async def _killed(process: BaseProcess, ended: asyncio.Event) -> None:
    """End it, and give the kernel a moment to take its devices and their memory back: workers come next."""
    _kill(process)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TAKEN_BACK):
            await ended.wait()


def _kill(process: BaseProcess) -> None:
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
