"""Operations of asynchronous backends (NCCL), watched to their real end.

Their `wait` orders the caller's stream behind them and returns at once; who wants to know when the network is
free has to look. It is looked for two more things: how long an operation takes, since torch's own watchdog is
off (it would end every survivor that notices a lost peer), and what became of it when it was aborted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ft_core.comm.inner import start
from ft_core.process import stream

POLL = 0.002
"""Seconds. A step's exchange takes longer, and so does a chunk of a snapshot that waits for its end."""

LINKS = 0.5
"""Seconds between two looks at the links under what is in flight."""


@dataclass
class InFlight:
    """`completed`: whether the device has done it. `on_end` is called once it has; `on_timeout` once, in a
    thread of its own, if it has not at `deadline` (time.monotonic); `on_error` likewise, with what
    `link_error` says, which is the same function for all that use the same link."""

    completed: Callable[[], bool]
    on_end: Callable[[], None]
    on_timeout: Callable[[], None]
    deadline: float
    link_error: Callable[[], str] = lambda: ""
    on_error: Callable[[str], None] = lambda error: None


class Watchdog:
    """Watches what is in flight, from a thread of its own."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[InFlight] = queue.SimpleQueue()  # the garbage collector may put one in
        self._thread: threading.Thread | None = None

    def begin(self, device: int | None = None) -> None:
        """There will be something to watch, of that device. Not for the garbage collector."""
        if self._thread is None:
            self._thread = start("watchdog", self._run, device)

    def watch(self, operation: InFlight) -> None:
        """Any thread, at any time."""
        self._new.put(operation)

    def _run(self, device: int | None) -> None:
        if device is not None:
            stream.use(device)  # a thread begins with the first, and would have a context there
        watched: list[InFlight] = []
        look = 0.0
        while True:
            if not watched:
                watched.append(self._new.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    watched.append(self._new.get_nowait())
            if time.monotonic() > look:
                _look_at_links(watched)
                look = time.monotonic() + LINKS
            watched = [operation for operation in watched if not _over(operation)]
            if watched:
                time.sleep(POLL)


def _look_at_links(watched: list[InFlight]) -> None:
    for operation in {operation.link_error: operation for operation in watched}.values():
        if error := operation.link_error():
            operation.link_error = lambda: ""
            start("link", operation.on_error, error)


def _over(operation: InFlight) -> bool:
    try:
        completed = operation.completed()
    except RuntimeError:  # a device that has failed; whoever uses it next is told
        completed = True
    if completed:
        operation.on_end()
    elif time.monotonic() > operation.deadline:
        operation.deadline = float("inf")
        start("timeout", operation.on_timeout)
    return completed
