"""What training has given its device to do: waiting for it, and places in it.

The device is CUDA's, or a stand-in of a test's (`comm.strict`), which shows on a host what a GPU does: the
thread that gives the work runs ahead of it. On a host without either nothing has to be waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import defaultdict, deque
from functools import cache
from typing import Any, Protocol

import torch

_UNTIMED, _ASLEEP = 2, 1
"""cudaEventDisableTiming; cudaEventBlockingSync: whoever waits sleeps, and keeps no core busy."""
_UNORDERED = 1
"""cudaStreamNonBlocking: no order with the legacy stream."""
_NOT_READY = 600

AHEAD = 16
"""Exchanges that the host is ahead of its device by, at most, in each stream. What lies between so many is
some hundred kernels, and a device's queue takes a thousand."""
_EVERY = 4
"""Exchanges from one place that is waited for to the next."""


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


def use(device: int) -> None:
    """What this thread does on a device, it does on that one."""
    if stand_in is None:
        torch.cuda.set_device(device)


def event() -> Event:
    """The place behind what this thread's stream has been given. For hosts with a device."""
    if stand_in is not None:
        return stand_in.event()
    if (cuda := _library()) is not None:
        return _Event(cuda, torch.cuda.current_stream().cuda_stream)
    found = torch.cuda.Event(blocking=True)
    found.record(torch.cuda.current_stream())
    return found


class RunAhead:
    """Holds the host back where it is far ahead of its device.

    Behind an operation whose peer is lost nothing begins. Whoever gives the device more then waits for room
    in its queue, some of them with Python's lock, without which nobody can abort what they wait for. So the
    host waits before, without it: only for what the stream has to do first anyway.
    """

    def __init__(self) -> None:
        self._given: defaultdict[int, int] = defaultdict(int)
        self._places: defaultdict[int, deque[Event]] = defaultdict(deque)
        """By stream."""

    def wait(self) -> None:
        """Before an exchange is given to this thread's stream."""
        if stand_in is not None:
            on = threading.get_ident()
        elif torch.cuda.is_initialized():
            on = torch.cuda.current_stream().cuda_stream
        else:
            return
        self._given[on] += 1
        if self._given[on] % _EVERY:
            return
        places = self._places[on]
        places.append(event())
        if len(places) * _EVERY > AHEAD:
            with contextlib.suppress(IndexError):  # another thread has taken it
                places.popleft().synchronize()


class _Event:
    """One of CUDA's, made by its own library.

    torch's is recorded with Python's lock held. Where the device's queue is full, to record one waits for
    room, and while the queue is full of what waits for a lost peer there is none: nobody could abort it
    without the lock. A call by `ctypes` lets go of it.
    """

    def __init__(self, cuda: Any, on: int) -> None:
        self._cuda, self._event = cuda, ctypes.c_void_p()
        _check(cuda.cudaEventCreateWithFlags(ctypes.byref(self._event), _UNTIMED | _ASLEEP))
        _check(cuda.cudaEventRecord(self._event, ctypes.c_void_p(on)))

    def query(self) -> bool:
        code = self._cuda.cudaEventQuery(self._event)
        if code != _NOT_READY:
            _check(code)
        return bool(code != _NOT_READY)

    def synchronize(self) -> None:
        _check(self._cuda.cudaEventSynchronize(self._event))

    def __del__(self) -> None:
        self._cuda.cudaEventDestroy(self._event)


def _check(code: int, what: str = "an event") -> None:
    if code:
        raise RuntimeError(f"CUDA error {code} of {what}")


@cache
def _library() -> Any:
    """CUDA's, which torch has loaded; None where it is not to be found."""
    major = (torch.version.cuda or "").partition(".")[0]
    with contextlib.suppress(OSError):
        return ctypes.CDLL(f"libcudart.so.{major}")
    return None


def beside() -> Any:
    """A stream of this thread's device, for copies that nobody else's work is to wait for.

    torch's come out of a pool of 32, where another may have been given the same.
    """
    if (cuda := _library()) is None:
        return torch.cuda.Stream()
    made = ctypes.c_void_p()
    _check(cuda.cudaStreamCreateWithFlags(ctypes.byref(made), _UNORDERED), "a stream")
    return torch.cuda.ExternalStream(made.value)


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
