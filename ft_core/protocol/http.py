"""What a controller or an agent answers over HTTP, and how it gets at what its own event loop knows."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from starlette.routing import Route

T = TypeVar("T")

ASKS = 5.0
"""Seconds that a client may take to ask."""
SECONDS = 5.0
"""Seconds that the event loop may take to answer."""
FRESH = 0.5
"""Seconds for which numbers are good, whoever asks."""


class Answer(NamedTuple):
    """An answer to a request."""

    code: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


OK = Answer(200, b"ok\n")


async def called(loop: asyncio.AbstractEventLoop, take: Callable[[], T]) -> T:
    """What `take` returns, or raises, in another thread's event loop. Raises TimeoutError where that is busy,
    and RuntimeError where it is closed."""
    waiting: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if waiting.set_running_or_notify_cancel():
            try:
                waiting.set_result(take())
            except Exception as error:  # it is told of where it is asked for
                waiting.set_exception(error)

    loop.call_soon_threadsafe(run)
    async with asyncio.timeout(SECONDS):
        return await asyncio.wrap_future(waiting)


class Numbering(Generic[T]):
    """An event loop's numbers, for another one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[], T]) -> None:
        """`take` is called in `loop`."""
        self._loop, self._take, self._lock = loop, take, asyncio.Lock()
        self._newest: tuple[float, T] | None = None

    async def get(self) -> T | None:
        """None: the event loop does not answer, or is none any more."""
        async with self._lock:
            if self._newest is not None and time.monotonic() - self._newest[0] < FRESH:
                return self._newest[1]
            try:
                found = await called(self._loop, self._take)
            except (RuntimeError, TimeoutError):
                return None
            self._newest = time.monotonic(), found
            return found


class Site(Protocol):
    """What is served beside numbers."""

    def routes(self) -> list[Route]:
        """The routes, as starlette has them."""

    async def run(self) -> None:
        """What it does while it is served."""
