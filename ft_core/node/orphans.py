"""What workers leave behind when they die: processes that they had started.

A checkpoint's writer, a data loader, a multiprocessing manager outlives the worker that is killed, holds
its memory, and may go on writing to files that the worker's successor writes. As a subreaper (prctl(2)) the
agent inherits such processes, at whatever depth they were started, and ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From here on, orphans among this process's descendants become its children."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_own: set[int] = set()


def own(pid: int) -> None:
    """A child that is no orphan."""
    _own.add(pid)


def end() -> bool:
    """SIGKILL the orphans that have come, and what they had started; they are reaped by the next call.

    All but those that clean up what a process has left behind, and end by themselves once the orphans have.
    Returns whether none of either kind is left.
    """
    own = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    left = False
    for pid in _children(os.getpid()) - own - _own:
        with contextlib.suppress(OSError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                left = True
                _end(pid)
    return not left


def end_of(worker: int) -> None:
    """SIGKILL to what a worker has started which is ending: it may take seconds until that comes here."""
    for pid in _children(worker):
        with contextlib.suppress(OSError):
            _end(pid)


def _end(pid: int) -> None:
    if b"multiprocessing.resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        os.kill(pid, signal.SIGKILL)


def end_all(seconds: float) -> bool:
    """SIGKILL all children, and the orphans that come of it. False: not all have ended within `seconds`."""
    deadline = time.monotonic() + seconds
    while children := _children(os.getpid()):
        if time.monotonic() > deadline:
            return False
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return True


def _children(of: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent, *_ = path.read_bytes().rpartition(b")")[2].split()  # its name is any bytes
            if int(parent) == of:
                found.add(int(path.parent.name))
    return found
