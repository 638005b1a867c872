"""Processes on their way out, which the kernel tells of before they are gone.

Who is killed is gone for `wait` and for its peers once the kernel has freed its memory and closed what it had
open, in this order: a quarter of a second for some GB, many seconds for hundreds. But it has done nothing any
more since it began to end, and how it ends is known from then on.
"""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable
from pathlib import Path

_SHARED, _ROBUST = 1, 1
"""PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST, of glibc and musl."""
_LOOK = 10.0
"""Seconds after which who waits for a lock looks whether it still should."""
_PF_EXITING = 0x4
_held: list[object] = []
"""Memory of locks that threads of this process hold, which therefore stays mapped: it is linked with that of
the thread's next one, and whatever came to its place would be written to."""


def status(pid: int) -> int | None:
    """How a process that is ending will have ended, as `os.wait` tells it; None: it is not, or it is gone.
    0 also where the kernel does not say how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # see proc_pid_stat(5)
    except OSError:
        return None
    return int(fields[49]) if int(fields[6]) & _PF_EXITING else None


class Lock:
    """A mutex in memory that processes share. The kernel takes it from a thread that ends, and wakes who
    waits for it, before it does anything about the memory of the thread's process (get_robust_list(2))."""

    BYTES = 64
    """For a pthread_mutex_t, of any architecture."""

    def __init__(self, memory: memoryview) -> None:
        """In the first `BYTES` of `memory`, aligned."""
        self._memory = (ctypes.c_char * self.BYTES).from_buffer(memory)
        self._libc = ctypes.CDLL(None)

    def create(self) -> None:
        """Before anybody uses it."""
        kind = ctypes.create_string_buffer(self.BYTES)
        self._libc.pthread_mutexattr_init(kind)
        self._libc.pthread_mutexattr_setpshared(kind, _SHARED)
        self._libc.pthread_mutexattr_setrobust(kind, _ROBUST)
        self._libc.pthread_mutex_init(self._memory, kind)

    def hold(self) -> None:
        """Until this thread ends, or executes another program."""
        _held.append(self._memory)
        self._libc.pthread_mutex_lock(self._memory)

    def holder_ends(self, wanted: Callable[[], bool]) -> bool:
        """Wait until who holds it ends. False: nobody holds it, or that is not `wanted` any more."""
        while wanted():
            until = _Time(int(time.time() + _LOOK), 0)
            if (found := self._libc.pthread_mutex_timedlock(self._memory, ctypes.byref(until))) == 0:
                self._libc.pthread_mutex_unlock(self._memory)
                return False
            if found == errno.EOWNERDEAD:
                self._libc.pthread_mutex_unlock(self._memory)  # and nobody can take it again
                return True
            if found != errno.ETIMEDOUT:
                return False
        return False


class _Time(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]
