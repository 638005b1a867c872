"""HTTP of a controller or an agent, for whoever wants to know how it is. A file `http` has its base URL.

A thread with an event loop of its own answers (`protocol.http_loop`), with what the process's own event loop
hands over when it is asked for it. A client that reads slowly, or not at all, holds neither up: there are few
connections, the oldest goes for the next one, and one that does not take what it is sent is closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ft_core.protocol.http import Answer, Numbering, Site
from ft_core.protocol.sockets import join_address, listen, split_address

log = logging.getLogger(__name__)
T = TypeVar("T")

NAME = "http"
"""The file with the base URL."""


class Server:
    """Serves until it is closed."""

    def __init__(
        self,
        address: str,
        numbers: Numbering[T],
        pages: Mapping[str, Callable[[T], Answer]],
        site: Callable[[str], Site] | None = None,
    ) -> None:
        """`pages`: by path. `site`: made in the thread that serves, of the base URL. Raises OSError if it
        cannot listen there: HOST:PORT; of port 0, a free one."""
        host, port = split_address(address)
        self._numbers, self._pages, self._site = numbers, pages, site
        self._listener = listen(host, port)
        self.server_port: int = self._listener.getsockname()[1]
        self.url = f"http://{join_address(host, self.server_port)}"
        self._closing: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self, directory: Path) -> None:
        """Serve in a thread; the base URL is in the directory's file `http` soon."""
        threading.Thread(target=self._run, args=(directory / NAME,), name="ft-http", daemon=True).start()

    def _run(self, path: Path) -> None:
        try:
            # Only who serves waits for these modules: not an agent without metrics, nor who takes a job over.
            from ft_core.protocol.http_loop import serve

            with contextlib.suppress(OSError):  # a disk that is full: it is served all the same
                beside = path.with_name(f".{NAME}-{os.getpid()}")
                beside.write_text(self.url + "\n")
                beside.replace(path)
            site = self._site(self.url) if self._site is not None else None
            asyncio.run(serve(self._listener, self._closing, self._numbers, self._pages, site))
        except Exception:
            log.exception("there are no metrics any more")

    def close(self) -> None:
        """Take no more requests. Never waits. The port is free at once: this process may lead again."""
        if not self._closing.done():
            self._closing.set_result(None)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
