"""Metadata services of clouds, as they speak, and as they fail: for whoever asks them over HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Reply = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


class Service:
    """One that answers as its subclass says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """METHOD and path of every request."""
        self.trouble: Callable[[], Reply | bytes] | None = None
        """What it does in place of an answer: another one, or bytes as they are."""

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        """`headers` by names in lower case."""
        raise NotImplementedError

    @contextlib.contextmanager
    def serving(self) -> Iterator[tuple[str, int]]:
        """At which address."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                service.asked.append(f"{self.command} {self.path}")
                if service.trouble is not None:
                    found = service.trouble()
                else:
                    known = {name.lower(): value for name, value in self.headers.items()}
                    found = service.reply(self.command, self.path, known, body)
                self.close_connection = True
                if isinstance(found, bytes):
                    self.wfile.write(found)
                    return
                status, headers, text = found
                with contextlib.suppress(ConnectionError):  # who has asked has heard enough
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            do_GET = do_PUT = do_POST = do_PATCH = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield ("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class AwsService(Service):
    """IMDSv2: no token, no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = "first=="
        self.action: object = None
        self.rebalance: object = None

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if path == "/latest/api/token":
            seconds = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if method != "PUT" or not seconds.isdigit() or not 1 <= int(seconds) <= 21600:
                return 400, {}, b""
            return 200, {}, self.token.encode()
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, {}, b"Unauthorized"
        known = {"spot/instance-action": self.action, "events/recommendations/rebalance": self.rebalance}
        found = known.get(path.removeprefix("/latest/meta-data/"))
        return (404, {}, b"Not Found") if found is None else (200, {}, json.dumps(found).encode())


class GcpService(Service):
    """Holds its answer back until there is news."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if headers.get("metadata-flavor") != "Google" or headers.get("host") != "metadata.google.internal":
            return 403, {}, b"Missing Metadata-Flavor:Google header"
        parts = urlsplit(path)
        name = parts.path.removeprefix("/computeMetadata/v1/instance/")
        asked = parse_qs(parts.query)
        end = time.monotonic() + float(asked.get("timeout_sec", ["0"])[0])
        while asked.get("wait_for_change") == ["true"] and asked["last_etag"] == [self.etag(name)]:
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        return 200, {"ETag": self.etag(name), "Metadata-Flavor": "Google"}, self.values[name].encode()

    def etag(self, name: str) -> str:
        """Of a value."""
        return self.values[name].encode().hex()[:16]


class AzureService(Service):
    """Scheduled Events of a scale set."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.started: list[str] = []

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        parts = urlsplit(path)
        if headers.get("metadata") != "true" or "api-version" not in parse_qs(parts.query):
            return 400, {}, b'{"error": "Bad request. Required metadata header not specified"}'
        if parts.path == "/metadata/instance/compute/name":
            return 200, {}, b"workers_3"
        if parts.path != "/metadata/scheduledevents" or "2020-07-01" not in path:
            return 404, {}, b""
        if method == "POST":
            self.started += [each["EventId"] for each in json.loads(body)["StartRequests"]]
            return 200, {}, b""
        return 200, {}, json.dumps({"DocumentIncarnation": 2, "Events": self.events}).encode()


class KubernetesService(Service):
    """The API server's pods and nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = "token1"
        self.pod: dict[str, Any] = {"metadata": {"name": "gpt-0"}, "spec": {"nodeName": "gpu7"}}
        self.node: dict[str, Any] | None = {"metadata": {"name": "gpu7"}, "spec": {}}

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if headers.get("authorization") != f"Bearer {self.token}":
            return 401, {}, b"{}"
        found = {"/api/v1/namespaces/ml/pods/gpt-0": self.pod, "/api/v1/nodes/gpu7": self.node}.get(path)
        return (403, {}, b"{}") if found is None else (200, {}, json.dumps(found).encode())
