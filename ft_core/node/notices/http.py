"""One request to a metadata service or an API server, in an event loop, with one limit for all of it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

import h11

from ft_core.node.notices.notice import LIMIT

_MOST = 1 << 20
"""Bytes of an answer."""


class Server(NamedTuple):
    """A server to ask."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    name: str = ""
    """The name by which it is called in the request; its address, as a rule."""


class Answer(NamedTuple):
    """What it has said."""

    status: int
    headers: dict[str, str]
    """The answer's headers, by names in lower case."""
    body: bytes

    def text(self) -> str:
        """The body. Raises ValueError."""
        return self.body.decode().strip()

    def object(self) -> dict[str, Any]:
        """The body as the JSON object that it must be. Raises ValueError."""
        try:
            found = json.loads(self.body)
        except RecursionError:
            raise ValueError(f"no object, but {self.body[:80]!r}") from None
        if not isinstance(found, dict):
            raise ValueError(f"no object, but {self.body[:80]!r}")
        return found


async def ask(
    server: Server,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    limit: float = LIMIT,
) -> Answer:
    """Ask. `limit`: seconds until the whole answer is there. Raises OSError, and ValueError for what is no
    HTTP, or too much of it. Proxies of the environment are not asked: metadata is of this machine."""
    said = {"Host": server.name or server.host, "Connection": "close", "Accept": "*/*", **headers}
    if body:
        said["Content-Length"] = str(len(body))
    try:
        async with asyncio.timeout(limit):
            reader, writer = await asyncio.open_connection(server.host, server.port, ssl=server.tls)
            try:
                return await _converse(reader, writer, method, path, said, body)
            finally:
                writer.close()
    except TimeoutError:
        raise TimeoutError(f"no answer within {limit:g} s") from None
    except h11.ProtocolError as error:  # in the answer, or in names that the request is made of
        raise ValueError(f"no HTTP: {error}") from None


async def _converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
) -> Answer:
    connection = h11.Connection(h11.CLIENT)
    asked = connection.send(h11.Request(method=method, target=path, headers=list(headers.items()))) or b""
    if body:
        asked += connection.send(h11.Data(data=body)) or b""
    writer.write(asked + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    status, found, answer = 0, dict[str, str](), b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Response):
            status = event.status_code
            found = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            answer += event.data
            if len(answer) > _MOST:
                raise ValueError(f"an answer of more than {_MOST} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return Answer(status, found, answer)
        elif not isinstance(event, h11.InformationalResponse):
            raise ConnectionError("the connection has ended before the answer")
