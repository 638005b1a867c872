"""HTTP of a controller or an agent, for whoever wants to know how it is. A file `http` has its base URL.

Threads of their own answer, with numbers that the event loop hands over when it is asked for them: a client
that reads slowly, or not at all, holds a thread up, and never that loop. There are few such threads; the
oldest connection goes for the next. Nothing that a client sends is shown to anybody, or does anything.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ft_core.protocol.sockets import join_address, split_address

log = logging.getLogger(__name__)
T = TypeVar("T")

NAME = "http"
"""The file with the base URL."""
SECONDS = 5.0
"""That a client may take to say or take anything; and the event loop, to answer."""
CONNECTIONS = 32
FRESH = 0.5
"""Seconds for which numbers are good, whoever asks."""


class Answer(NamedTuple):
    """To a request."""

    code: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


OK = Answer(200, b"ok\n")


class Numbering(Generic[T]):
    """An event loop's numbers, for other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[], T]) -> None:
        """`take` is called in the event loop."""
        self._loop, self._take, self._lock = loop, take, threading.Lock()
        self._newest: tuple[float, T] | None = None

    def get(self) -> T | None:
        """None: the event loop does not answer, or is none any more."""
        with self._lock:
            if self._newest is not None and time.monotonic() - self._newest[0] < FRESH:
                return self._newest[1]
            waiting: concurrent.futures.Future[T] = concurrent.futures.Future()

            def take() -> None:
                if waiting.set_running_or_notify_cancel():
                    try:
                        waiting.set_result(self._take())
                    except Exception as error:  # it is told of where it is asked for
                        waiting.set_exception(error)

            try:
                self._loop.call_soon_threadsafe(take)
                found = waiting.result(SECONDS)
            except (RuntimeError, TimeoutError):  # its loop is closed, or busy
                waiting.cancel()
                return None
            self._newest = time.monotonic(), found
            return found


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SECONDS
    server_version = "ft"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer, and hang up."""
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self._answer(Answer(404, b"not found\n"))
        elif (found := self.server.numbers.get()) is None:
            self._answer(Answer(503, b"it does not answer\n"))
        else:
            self._answer(page(found))

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, answer: Answer) -> None:
        self.send_response(answer.code)
        for name, value in {
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request that is answered here; nothing of it is repeated."""
        self.close_connection = True
        self._answer(Answer(code, b"no such request\n"))

    def log_message(self, *_: object) -> None:
        """Nobody wants to read of each request."""


class Server(ThreadingHTTPServer):
    """Serves until it is closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(
        self, address: str, numbers: Numbering[T], pages: Mapping[str, Callable[[T], Answer]]
    ) -> None:
        """`pages`: by path. Raises OSError if it cannot listen there: HOST:PORT; of port 0, a free one."""
        host, port = split_address(address)
        self.numbers: Numbering[Any] = numbers
        self.pages = pages
        self._open: dict[socket.socket, None] = {}
        """The oldest first."""
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.url = f"http://{join_address(host, self.server_port)}"

    def start(self, directory: Path) -> None:
        """In a thread; the base URL is in the directory's file `http` soon."""
        threading.Thread(target=self._run, args=(directory / NAME,), name="ft-http", daemon=True).start()

    def _run(self, path: Path) -> None:
        try:
            with contextlib.suppress(OSError):  # a disk that is full: it is served all the same
                beside = path.with_name(f".{NAME}-{os.getpid()}")
                beside.write_text(self.url + "\n")
                beside.replace(path)
            self.serve_forever()
        except Exception:
            log.exception("there are no metrics any more")

    def close(self) -> None:
        """Take no more requests. Never waits. The port is free at once: this process may lead again."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._close, name="ft-http-end", daemon=True).start()

    def _close(self) -> None:
        self.shutdown()
        self.server_close()

    # -- of socketserver ---------------------------------------------------------------------------

    def server_bind(self) -> None:
        """As of a plain server: the name of this machine is not looked up, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "ft", self.server_address[1]

    def get_request(self) -> tuple[socket.socket, object]:
        """The next connection; the oldest goes for it if there are too many."""
        try:
            connection, peer = super().get_request()
        except OSError:
            time.sleep(0.1)  # out of file descriptors, for example: not again at once
            raise
        with self._lock:
            self._open[connection] = None
            if len(self._open) > CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        return connection, peer

    def close_request(self, request: object) -> None:
        """It is answered, or gone."""
        with self._lock:
            self._open.pop(request, None)  # type: ignore[call-overload]
        super().close_request(request)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is none."""
        if not isinstance(sys.exception(), OSError):
            log.exception("a request to the HTTP port failed")
