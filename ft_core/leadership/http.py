"""Requests to servers of which any may answer: JSON over HTTP, by the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ft_core.leadership.base import LeadershipError

TRY = 1.0
"""Seconds for one server to answer; then the next one is asked."""
OK = 200
"""The status of an answer that has something to say."""
_MOST = 1 << 20
"""Bytes of an answer."""


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Within this block an answer is read. Raises LeadershipError if it is none: a proxy, or a server that is
    just starting, may give anything."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise LeadershipError(f"{place}: an answer that cannot be read: {error!r}") from error


class Client:
    """Keeps one connection, to the server that has answered last."""

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        tls: ssl.SSLContext | None,
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`headers`: of every request; read anew each time, as tokens are replaced."""
        self._servers, self._tls, self._headers = list(servers), tls, headers
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """Status, and what was answered. Raises LeadershipError if no server answers so that it can be read,
        or only that it fails (status 500 and above)."""
        problem = ""
        tries = len(self._servers) + (self._connection is not None)  # what was kept may have been closed
        for _ in range(tries):
            host, port = self._servers[0]
            try:
                status, answer = self._ask(method, path, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{host}:{port}: {error or type(error).__name__}"
                kept = self._connection is not None
                self.close()
                if not kept:
                    self._servers.append(self._servers.pop(0))
                continue
            if status < 500:
                return status, answer
            problem = f"{host}:{port}: status {status}: {str(answer)[:200]}"
            self.close()
            self._servers.append(self._servers.pop(0))
        raise LeadershipError(problem)

    def _ask(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        fresh, connection = self._connection is None, self._connection
        if connection is None:
            host, port = self._servers[0]
            if self._tls is None:
                connection = http.client.HTTPConnection(host, port, timeout=TRY)
            else:
                connection = http.client.HTTPSConnection(host, port, timeout=TRY, context=self._tls)
        text = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._headers()}
        try:
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            found = response.read(_MOST)
            if not response.isclosed():
                raise ValueError(f"an answer of more than {_MOST} bytes")
            answer = json.loads(found if found or response.status == OK else b"{}")
        except BaseException:
            if fresh:
                connection.close()
            raise
        self._connection = connection
        if not isinstance(answer, dict):
            answer = {"answer": answer}
        return response.status, answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
