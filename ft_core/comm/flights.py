"""Operations of asynchronous backends (NCCL), followed to their real end.

Their `wait` orders the caller's stream behind them and returns at once; who wants to know when the network is
free has to look. It is looked for two more things: how long an operation takes, since torch's own watch over
that is off (it would end every survivor that notices a lost peer), and what became of it when it was aborted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ft_core.comm.inner import start

POLL = 0.002
"""Seconds. A step's exchange takes longer, and so does a chunk of a snapshot that waits for its end."""


@dataclass
class Flight:
    """`landed`: whether the device has done it. `ended` is called once it has; `overdue` once, in a thread of
    its own, if it has not at `deadline` (time.monotonic)."""

    landed: Callable[[], bool]
    ended: Callable[[], None]
    overdue: Callable[[], None]
    deadline: float


class Flights:
    """Those under way, and the thread that looks after them while there are any."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[Flight] = queue.SimpleQueue()  # the garbage collector may put one in
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """There will be some. Not for the garbage collector."""
        if self._thread is None:
            self._thread = start("flights", self._run)

    def follow(self, flight: Flight) -> None:
        """Any thread, at any time."""
        self._new.put(flight)

    def _run(self) -> None:
        under_way: list[Flight] = []
        while True:
            if not under_way:
                under_way.append(self._new.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    under_way.append(self._new.get_nowait())
            under_way = [flight for flight in under_way if not _over(flight)]
            if under_way:
                time.sleep(POLL)


def _over(flight: Flight) -> bool:
    try:
        landed = flight.landed()
    except RuntimeError:  # a device that has failed; whoever uses it next is told
        landed = True
    if landed:
        flight.ended()
    elif time.monotonic() > flight.deadline:
        flight.deadline = float("inf")
        start("overdue", flight.overdue)
    return landed
