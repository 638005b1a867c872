"""What a newcomer's script gives to threads of its own on its way, as those who write checkpoints or metrics
in the background do.

They are behind the script, and what they do of passed steps belongs to the layer as well: files are not real
before it is done. Work that comes to an end is waited for: futures, threads that the interpreter itself would
wait for, what is put in a queue that a thread takes from.
"""

from __future__ import annotations

import concurrent.futures.thread
import os
import queue
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

_PATIENCE = 10.0
"""Seconds for work that comes to an end."""
_QUEUE_PATIENCE = 2.0
"""The same for a queue: the thread that takes from it may wait for the script, and nobody can tell."""
_PAUSE = 0.005
_POOLED: Container[threading.Thread] = concurrent.futures.thread._threads_queues
"""Threads of executors, which wait for more."""

Turn = Callable[[Any, str, Callable[..., Any]], None]


class Given:
    """Work that the script's main thread has given away."""

    def __init__(self, turn: Turn, notes: Callable[[], bool]) -> None:
        """`turn` puts a function in an attribute's place. `notes`: whether what is given now is passed."""
        self._process, self._main, self._notes = os.getpid(), threading.get_ident(), notes
        self._futures: WeakSet[Future[Any]] = WeakSet()
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._queues: WeakSet[queue.Queue[Any]] = WeakSet()
        for owner, name, noted in (
            (Future, "__init__", self._futures.add),
            (threading.Thread, "start", self._started),
            (queue.Queue, "put", self._queues.add),
        ):
            turn(owner, name, self._noting(getattr(owner, name), noted))

    def _noting(self, original: Callable[..., Any], noted: Callable[[Any], None]) -> Callable[..., Any]:
        def call(given: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(given, *args, **kwargs)
            if threading.get_ident() == self._main and os.getpid() == self._process and self._notes():
                noted(given)
            return result

        return call

    def _started(self, thread: threading.Thread) -> None:
        if not thread.daemon:
            self._threads.add(thread)

    def __bool__(self) -> bool:
        """Whether there was any, since all of it was done."""
        return bool(self._futures or self._threads or self._queues)

    def done(self) -> bool:
        """Wait for all of it, for a while. Returns whether what comes to an end has."""
        till = time.monotonic() + _PATIENCE
        while self._is_under_way():
            if time.monotonic() > till:
                return False
            _sleep(_PAUSE)
        till = min(till, time.monotonic() + _QUEUE_PATIENCE)
        while any(map(_is_taken_from, self._queues)) and time.monotonic() < till:
            _sleep(_PAUSE)
        for given in (self._futures, self._threads, self._queues):
            given.clear()
        return True

    def _is_under_way(self) -> bool:
        return any(not future.done() for future in self._futures) or any(
            thread.is_alive() and thread not in _POOLED for thread in self._threads
        )


_sleep = time.sleep


def _is_taken_from(given: queue.Queue[Any]) -> bool:
    """Whether something of it is to be taken, or was and its taker has not come back for more."""
    with given.mutex:
        waits = bool(given.not_empty._waiters)  # type: ignore[attr-defined]
        return bool(given.unfinished_tasks) and (given._qsize() > 0 or not waits)
