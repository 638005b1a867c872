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
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4


def adopt() -> None:
    """From here on, orphans among this process's descendants become its children."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_own: set[int] = set()
_starting = threading.Lock()
"""Held while a child is started that nobody may take for an orphan before it is known."""


def own(pid: int) -> None:
    """A child that is no orphan."""
    _own.add(pid)


@contextlib.contextmanager
def child(start: Callable[[], subprocess.Popen[bytes]]) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is no orphan, until the end of the block, in which it is waited for."""
    with _starting:
        process = start()
        own(process.pid)
    try:
        yield process
    finally:
        _own.discard(process.pid)


def end() -> bool:
    """SIGKILL the orphans that have come, and what they had started; they are reaped by the next call.

    All but those that clean up what a process has left behind, and end by themselves once the orphans have.
    Returns whether none of either kind is left.
    """
    own = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    left = False
    with _starting:
        orphans = _children(os.getpid()) - own - _own
    for pid in orphans:
        with contextlib.suppress(OSError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                left = True
                if not _cleans_up(pid):
                    _end(pid, os.getpid())
    return not left


def end_of(worker: int) -> None:
    """SIGKILL to what a worker has started which is ending: it may take seconds until that comes here. If
    another process has its number by now, nothing happens."""
    for pid in _children(worker):
        with contextlib.suppress(OSError):
            if _is_ending(worker) and not _cleans_up(pid):
                _end(pid, worker)


def _cleans_up(pid: int) -> bool:
    return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _end(pid: int, parent: int) -> None:
    """SIGKILL to this process, and to no other that has its number by now. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        if int(_stat(pid)[1]) == parent:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)


def _is_ending(pid: int) -> bool:
    state, *_, flags = _stat(pid)[:7]
    return state in "ZX" or bool(int(flags) & _PF_EXITING)


def _stat(pid: int) -> list[str]:
    """What follows the program's name in /proc/PID/stat: state, parent, ... Raises OSError."""
    text = Path(f"/proc/{pid}/stat").read_bytes()  # its name is any bytes
    return text.rpartition(b")")[2].decode().split()


def end_all(seconds: float) -> bool:
    """SIGKILL all children, and the orphans that come of it. False: not all have ended within `seconds`."""
    deadline = time.monotonic() + seconds
    while children := _children(os.getpid()):
        if time.monotonic() > deadline:
            return False
        for pid in children:
            with contextlib.suppress(OSError):
                _end(pid, os.getpid())
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return True


def _children(of: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        pid = int(path.parent.name)
        with contextlib.suppress(OSError):  # it has ended
            if int(_stat(pid)[1]) == of:
                found.add(pid)
    return found
