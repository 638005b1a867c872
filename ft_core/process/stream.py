"""What training has given its device to do: waiting for it, and places in it.

The device is CUDA's, or a stand-in of a test's (`comm.strict`), which shows on a host what a GPU does: the
thread that gives the work runs ahead of it. On a host without either nothing has to be waited for.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether all before it is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Device(Protocol):
    """What stands in for a GPU."""

    def event(self) -> Event:
        """The place behind what this thread has given so far."""

    def settle(self) -> None:
        """Wait for all that this thread has given."""

    def drain(self) -> None:
        """Wait for all that anybody has given."""


stand_in: Device | None = None
"""Set once per process, before the script begins."""


def settle() -> None:
    """Wait for what this thread's stream has been given."""
    if stand_in is not None:
        stand_in.settle()
    elif _in_use():
        torch.cuda.current_stream().synchronize()


def drain() -> None:
    """Wait for all that the device has been given. Raises RuntimeError where the device has failed."""
    if stand_in is not None:
        stand_in.drain()
    elif _in_use():
        torch.cuda.synchronize()


def has_gpu() -> bool:
    """Whether there is a real GPU: a shadowed `torch.cuda` (CPU runs) says it is available, too."""
    return torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0


def _in_use() -> bool:
    return torch.cuda.is_initialized() and has_gpu()
