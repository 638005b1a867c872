"""Tasks of which none ends in an error that nobody sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """The tasks of an event loop. `failed` is told of every error that ends one of them, or a callback."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._running: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().set_exception_handler(self._in_a_callback)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin `work`; it is referred to until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> list[asyncio.Task[None]]:
        """End what is under way, and return it."""
        for task in self._running:
            task.cancel()
        return list(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)

    def _in_a_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            self._failed(error)
        else:  # asyncio's own remarks, on connections mostly
            loop.default_exception_handler(context)
