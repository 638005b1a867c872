"""The event loop of an HTTP server: its connections, and what all answers have in common."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ft_core.protocol import http
from ft_core.protocol.http import Answer, Numbering, Site

T = TypeVar("T")

CONNECTIONS = 32
TAKES = 15.0
"""Seconds that a client has to take what it is sent."""
REQUEST_BYTES = 16 << 10
"""The most bytes of a request's line and headers."""
_ENDS = 2.0
"""Seconds that answers have to end in when nothing is served any more."""
HEADERS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every answer. There is one to a connection."""


class Connection(H11Protocol):
    """The connection of a client that is not waited for.

    uvicorn's own limits do not do that: `limit_concurrency` turns away whoever comes last, not who says
    nothing, and none is for a client that does not finish its request, or does not take what it is sent.
    """

    def __init__(self, config: Config, state: ServerState, known: dict[Connection, None]) -> None:
        """`known`: all, the oldest first."""
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._known = known
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The oldest goes if there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # what is not taken at once is noticed
        self.loop.call_later(http.ASKS, self._has_asked)
        self._known[self] = None
        if len(self._known) > CONNECTIONS:
            next(iter(self._known)).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """A request is answered, or who made it is gone."""
        self._known.pop(self, None)
        self.resume_writing()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Whatever was to be said."""
        self._known.pop(self, None)
        self.transport.abort()

    def _has_asked(self) -> None:
        if getattr(self, "cycle", None) is None:  # which uvicorn's types do not say that it may be
            self.drop()

    def pause_writing(self) -> None:
        """Something is not taken yet."""
        super().pause_writing()
        self._late = self._late or self.loop.call_later(TAKES, self.drop)

    def resume_writing(self) -> None:
        """All is."""
        super().resume_writing()
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def serve(
    listener: socket.socket,
    closing: concurrent.futures.Future[None],
    numbers: Numbering[T],
    pages: Mapping[str, Callable[[T], Answer]],
    site: Site | None,
) -> None:
    """Serve until it is closing. The listener is closed then."""
    loop = asyncio.get_running_loop()
    routes = [_numbers(numbers, path, page) for path, page in pages.items()]
    if site is not None:
        routes += site.routes()
    config = Config(
        _app(routes),
        interface="asgi3",
        lifespan="off",
        loop="none",
        ws="none",
        proxy_headers=False,
        log_config=None,
        log_level="error",
        access_log=False,
        h11_max_incomplete_event_size=REQUEST_BYTES,
    )
    state, known = ServerState(), dict[Connection, None]()

    def failed(loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        if not closing.done():  # or it was its port that was closed
            loop.default_exception_handler(about)

    loop.set_exception_handler(failed)
    if closing.done():
        listener.close()
        return
    serving = await loop.create_server(lambda: Connection(config, state, known), sock=listener)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(serving.close)
        if site is not None:
            running = asyncio.ensure_future(site.run())
            stack.callback(running.cancel)
            running.add_done_callback(lambda done: done.cancelled() or done.result())
        await asyncio.wrap_future(closing)
    for connection in list(known):
        connection.drop()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=_ENDS)


def _app(routes: Iterable[Route]) -> ASGIApp:
    inner = Starlette(routes=list(routes))
    inner.router.redirect_slashes = False  # it would repeat what it was asked for

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await inner(scope, receive, add)

    return app


def response(answer: Answer) -> Response:
    """The answer as starlette has it."""
    return Response(answer.body, answer.code, media_type=answer.kind)


def _numbers(numbers: Numbering[T], path: str, page: Callable[[T], Answer]) -> Route:
    async def answer(_: Request) -> Response:
        if (found := await numbers.get()) is None:
            return response(Answer(503, b"it does not answer\n"))
        return response(page(found))

    return Route(path, answer, methods=["GET"])
