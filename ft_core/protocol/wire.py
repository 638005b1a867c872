"""Authenticated framing between the job's processes: worker, agent and controller.

Handshake, at most 5 s, fixed sizes only, so that a stranger can make nobody allocate or wait:

    server -> client   magic, 32-byte nonce
    client -> server   magic, 32-byte nonce, HMAC-SHA256(secret, "client", both nonces)
    server -> client   HMAC-SHA256(secret, "server", both nonces); 32 zero bytes and a close if it refuses

Both sides then derive one key per direction from the secret and the nonces.

A frame is magic, u32 length of the JSON, u64 length of the payload, 32-byte HMAC-SHA256 over (sequence
number, both lengths, JSON) under the direction's key; then the JSON, an object; then the payload's raw
bytes. So a frame cannot be forged, altered, repeated, dropped or moved to another connection. The
*payload* is not under the HMAC, which would cost more CPU than the transfer itself: the caller puts its
xxh3_64 checksum into the JSON, which finds every accident but not an attacker on the path. Where the
network is not the job's own, encrypt it below (WireGuard, IPsec).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol.door import lobby

HANDSHAKE_SECONDS = 5.0
MAX_JSON = 64 << 20
"""Bytes of JSON in one frame. The checksums of a 256 GiB segment take about 6 MiB."""

_MAGIC = b"FTW1"
_NONCE = 32
_REFUSED = bytes(32)
_HEADER = struct.Struct("!4sIQ32s")
_AUTHENTICATED = struct.Struct("!QIQ")
_SCRATCH = 1 << 20
_FOREIGN = "does not speak this protocol (or not this version of it)"

T = TypeVar("T")


def field(message: dict[str, Any], name: str, kind: type[T]) -> T:
    """`message[name]`, which must be exactly of type `kind`. Raises ProtocolError."""
    value = message.get(name)
    if type(value) is not kind:  # not isinstance: true is no number
        got = type(value).__name__
        raise ProtocolError(f"field {name!r} of a message must be {kind.__name__}, got {got}")
    return value


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket on this interface alone; port 0 picks a free one (see `getsockname`).

    For "unix:/path" as `host`, one there.
    """
    if host.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(host.removeprefix("unix:"))
        sock.listen(1024)
        return sock
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def reserve(host: str) -> socket.socket:
    """A free port while this socket is open: nobody is given it by chance, and who asks for it gets it."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"not an address: {address!r}; expected host:port or unix:/path")
    return host.strip("[]"), int(port)


def as_bytes(data: bytes | memoryview) -> memoryview:
    """A flat view of single bytes on contiguous memory, of any format and shape, empty ones too."""
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


class _Handshake:
    """The bytes of one side's handshake, without the input and output."""

    HELLO_BYTES = len(_MAGIC) + _NONCE
    ANSWER_BYTES = HELLO_BYTES + 32

    def __init__(self, secret: bytes, peer: str) -> None:
        if not secret:
            raise ValueError("the job's secret is empty: every process could join")
        self.secret = secret
        self.peer = peer
        self.nonce = os.urandom(_NONCE)
        self.hello = _MAGIC + self.nonce
        self.nonces = b""

    def _mac(self, label: bytes) -> bytes:
        return hmac.digest(self.secret, label + self.nonces, "sha256")

    def answer(self, hello: bytes) -> bytes:
        """Client: the proof that answers the server's hello."""
        if not hello.startswith(_MAGIC):
            raise ProtocolError(f"{self.peer} {_FOREIGN}")
        self.nonces = hello[len(_MAGIC) :] + self.nonce
        return self.hello + self._mac(b"client")

    def admit(self, answer: bytes) -> bytes:
        """Server: its own proof, once the client's is right."""
        if not answer.startswith(_MAGIC):
            raise AuthenticationError(f"{self.peer} {_FOREIGN}")
        self.nonces = self.nonce + answer[len(_MAGIC) : self.HELLO_BYTES]
        if not hmac.compare_digest(answer[self.HELLO_BYTES :], self._mac(b"client")):
            raise AuthenticationError(f"{self.peer} does not know this job's secret: connection refused")
        return self._mac(b"server")

    def confirm(self, proof: bytes) -> None:
        """Client: the server's last word."""
        if proof == _REFUSED:
            raise AuthenticationError(f"{self.peer} refused this process: its job has another secret")
        if not hmac.compare_digest(proof, self._mac(b"server")):
            raise AuthenticationError(f"{self.peer} does not know this job's secret: not talking to it")

    def codec(self, *, client: bool) -> _Codec:
        up, down = self._mac(b"key up"), self._mac(b"key down")
        return _Codec(up, down, self.peer) if client else _Codec(down, up, self.peer)


class _Codec:
    """Packs and opens the frames of one connection."""

    def __init__(self, send_key: bytes, receive_key: bytes, peer: str) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._peer = peer

    @staticmethod
    def encode(message: dict[str, Any]) -> bytes:
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_JSON:
            raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_JSON}")
        return body

    def pack(self, body: bytes, payload_bytes: int) -> bytes:
        known = _AUTHENTICATED.pack(self._sent, len(body), payload_bytes)
        mac = hmac.digest(self._send_key, known + body, "sha256")
        self._sent += 1
        return _HEADER.pack(_MAGIC, len(body), payload_bytes, mac) + body

    def body_bytes(self, header: bytes | bytearray) -> int:
        magic, length, _, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise ProtocolError(f"{self._peer} sent something that is not a frame")
        if length > MAX_JSON:
            raise ProtocolError(f"{self._peer} announced {length} bytes of JSON, the limit is {MAX_JSON}")
        return int(length)

    def open(self, header: bytes | bytearray, body: bytes | bytearray) -> tuple[dict[str, Any], int]:
        """The message and how many payload bytes follow."""
        _, length, payload_bytes, mac = _HEADER.unpack(header)
        known = _AUTHENTICATED.pack(self._received, length, payload_bytes)
        if not hmac.compare_digest(mac, hmac.digest(self._receive_key, known + body, "sha256")):
            raise AuthenticationError(f"a frame from {self._peer} was altered on the way, or is not from it")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{self._peer} sent a frame that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ProtocolError(f"{self._peer} sent a {type(message).__name__}, not an object")
        return message, int(payload_bytes)


_GONE_MS = 25_000


def _tune(sock: Any, family: int) -> None:
    """No delay for small frames, and a vanished node ends a connection within some 25 s, idle or not."""
    if family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Otherwise what is sent into a partition is tried for a quarter of an hour, ever more seldom.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)


def _peer_name(sock: Any, family: int) -> str:
    try:
        if family == socket.AF_UNIX:
            return f"unix:{sock.getsockname() or sock.getpeername()}"
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that is gone"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# The sockets stay in blocking mode and the time-outs are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): a chunk is
# then one system call with the GIL released, and sending and receiving threads have time-outs of their own.
def _set_kernel_timeout(sock: socket.socket, option: int, end: float | None) -> None:
    left = 0.0
    if end is not None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        left = max(left, 1e-3)  # zero would mean forever
    seconds = int(left)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, int((left - seconds) * 1e6)))


def _lost(peer: str, error: OSError) -> ConnectionResetError:
    return ConnectionResetError(f"connection to {peer} lost: {error.strerror or error}")


def _receive(sock: socket.socket, view: memoryview, end: float | None, peer: str) -> int:
    """At least one byte into `view`, as many as come until it is full or `end` (time.monotonic) is there."""
    try:
        _set_kernel_timeout(sock, socket.SO_RCVTIMEO, end)
        count = sock.recv_into(view, len(view), socket.MSG_WAITALL)
    except BlockingIOError:
        raise TimeoutError(f"nothing came from {peer} in time") from None
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise TimeoutError(f"nothing came from {peer} in time") from None
        raise _lost(peer, error) from error
    if not count:
        raise ConnectionResetError(f"{peer} closed the connection")
    return count


def _receive_exactly(sock: socket.socket, count: int, end: float | None, peer: str) -> bytes:
    data = memoryview(bytearray(count))
    have = 0
    while have < count:
        have += _receive(sock, data[have:], end, peer)
    return bytes(data)


def _send(sock: socket.socket, data: memoryview, end: float | None, peer: str, flags: int = 0) -> None:
    while len(data):
        try:
            _set_kernel_timeout(sock, socket.SO_SNDTIMEO, end)
            data = data[sock.send(data, flags) :]
        except BlockingIOError:
            raise TimeoutError(f"{peer} took nothing in time") from None
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise TimeoutError(f"{peer} took nothing in time") from None
            raise _lost(peer, error) from error


def _at(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have another thread's loop do it, if that still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _shut(sock: socket.socket) -> None:
    """Wake whoever is blocked in it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class Channel:
    """A blocking connection. `send` may be called by several threads, receiving is for one thread at a time.

    After `recv`, `payload_bytes` bytes of payload follow: take them with `recv_payload_into` or
    `skip_payload` before the next `recv`. A lost connection raises ConnectionError, `settimeout`'s limit
    TimeoutError. After a time-out in `recv`, `recv` may be called again; other failures close the channel.
    """

    def __init__(self, sock: socket.socket, codec: _Codec, peer: str) -> None:
        self.peer = peer
        self.payload_bytes = 0
        self._sock = sock
        self._codec = codec
        self._timeout: float | None = None
        self._lock = threading.Lock()
        self._header = bytearray(_HEADER.size)
        self._body: bytearray | None = None
        self._have = 0

    @classmethod
    def connect(cls, address: str, secret: bytes, timeout: float) -> Channel:
        """Connect to "host:port" or "unix:/path" and shake hands, all within `timeout` seconds.

        Raises AuthenticationError if either side has another secret, ProtocolError if something else answers
        there, OSError (ConnectionError, TimeoutError) if nobody does or the peer leaves: only the latter is
        worth trying again at once.
        """
        end = time.monotonic() + timeout
        if timeout <= 0:
            raise TimeoutError(f"no time left to connect to {address}")
        if address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout)
                sock.connect(address.removeprefix("unix:"))
            except BaseException:
                sock.close()
                raise
        else:
            sock = socket.create_connection(split_address(address), timeout=timeout)
        try:
            sock.settimeout(None)
            _tune(sock, sock.family)
            end = min(end, time.monotonic() + HANDSHAKE_SECONDS)
            hands = _Handshake(secret, address)
            answer = hands.answer(_receive_exactly(sock, _Handshake.HELLO_BYTES, end, address))
            _send(sock, memoryview(answer), end, address)
            hands.confirm(_receive_exactly(sock, len(_REFUSED), end, address))
        except BaseException:
            sock.close()
            raise
        return cls(sock, hands.codec(client=True), address)

    @classmethod
    def accept(cls, sock: socket.socket, secret: bytes, timeout: float = HANDSHAKE_SECONDS) -> Channel:
        """Shake hands as the server on an accepted socket, which is closed on failure.

        Raises AuthenticationError, whatever the reason: wrong secret, silence, garbage, hanging up.
        """
        peer = _peer_name(sock, sock.family)
        end = time.monotonic() + min(timeout, HANDSHAKE_SECONDS)
        try:
            with lobby.stay(lambda: _shut(sock)):
                sock.settimeout(None)
                _tune(sock, sock.family)
                hands = _Handshake(secret, peer)
                _send(sock, memoryview(hands.hello), end, peer)
                answer = _receive_exactly(sock, _Handshake.ANSWER_BYTES, end, peer)
                try:
                    proof = hands.admit(answer)
                except AuthenticationError:
                    _send(sock, memoryview(_REFUSED), end, peer)
                    raise
                _send(sock, memoryview(proof), end, peer)
        except OSError as error:
            sock.close()
            raise AuthenticationError(f"{peer} did not finish the handshake: {error}") from error
        except BaseException:
            sock.close()
            raise
        return cls(sock, hands.codec(client=False), peer)

    def settimeout(self, seconds: float | None) -> None:
        """Every later call, as a whole, raises TimeoutError after this long; None waits for ever."""
        self._timeout = seconds

    def fileno(self) -> int:
        return self._sock.fileno()

    def _end(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def send(self, message: dict[str, Any], payload: bytes | memoryview | None = None) -> None:
        """Send one frame. `payload` must be contiguous bytes; no copy of it is made."""
        body = _Codec.encode(message)
        data = as_bytes(b"" if payload is None else payload)
        end = self._end()
        if not self._lock.acquire(timeout=-1 if self._timeout is None else self._timeout):
            raise TimeoutError(f"{self.peer} is still taking another thread's frame")
        try:
            frame = memoryview(self._codec.pack(body, len(data)))
            _send(self._sock, frame, end, self.peer, socket.MSG_MORE if len(data) else 0)
            _send(self._sock, data, end, self.peer)
        except BaseException:
            self.close()  # half a frame may be out: nothing that follows would make sense
            raise
        finally:
            self._lock.release()

    def recv(self) -> dict[str, Any]:
        """The next frame's message. ProtocolError and AuthenticationError also close the channel."""
        if self.payload_bytes:
            raise ProtocolError(f"{self.payload_bytes} payload bytes from {self.peer} were not taken")
        end = self._end()
        try:
            if self._body is None:
                self._fill(self._header, end)
                self._body, self._have = bytearray(self._codec.body_bytes(self._header)), 0
            self._fill(self._body, end)
            message, self.payload_bytes = self._codec.open(self._header, self._body)
        except TimeoutError:
            raise
        except BaseException:
            self.close()
            raise
        self._body, self._have = None, 0
        return message

    def _fill(self, buffer: bytearray, end: float | None) -> None:
        """Complete `buffer`; what came before a time-out stays for the next call."""
        with memoryview(buffer) as view:
            while self._have < len(view):
                self._have += _receive(self._sock, view[self._have :], end, self.peer)

    def recv_payload_into(self, view: memoryview) -> None:
        """Fill `view`, contiguous, with the next `view.nbytes` bytes of the payload."""
        view = as_bytes(view)
        if len(view) > self.payload_bytes:
            raise ValueError(f"asked for {len(view)} payload bytes of {self.payload_bytes}")
        end = self._end()
        try:
            while len(view):
                count = _receive(self._sock, view, end, self.peer)
                self.payload_bytes -= count
                view = view[count:]
        except BaseException:
            self.close()
            raise

    def skip_payload(self) -> None:
        """Read what is left of the payload and forget it."""
        scratch = memoryview(bytearray(min(_SCRATCH, self.payload_bytes)))
        while self.payload_bytes:
            self.recv_payload_into(scratch[: self.payload_bytes])

    def idle(self) -> bool:
        """Whether the peer is still connected, as far as known, and has sent nothing yet."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def abort(self) -> None:
        """From any thread: whoever is blocked in this channel gets ConnectionError. `close` is still due."""
        _shut(self._sock)

    def close(self) -> None:
        self.abort()
        self._sock.close()


class AsyncChannel:
    """The same connection for asyncio: control messages only, a frame with a payload is an error."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: _Codec, peer: str
    ) -> None:
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._codec = codec
        self._header: bytes | None = None

    @classmethod
    async def connect(cls, address: str, secret: bytes, timeout: float = HANDSHAKE_SECONDS) -> AsyncChannel:
        """As `Channel.connect`."""
        async with asyncio.timeout(timeout):
            if address.startswith("unix:"):
                reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                reader, writer = await asyncio.open_connection(*split_address(address))
            try:
                sock = writer.get_extra_info("socket")
                _tune(sock, sock.family)
                hands = _Handshake(secret, address)
                writer.write(hands.answer(await reader.readexactly(_Handshake.HELLO_BYTES)))
                hands.confirm(await reader.readexactly(len(_REFUSED)))
            except asyncio.IncompleteReadError:
                writer.close()
                raise ConnectionResetError(f"{address} closed the connection during the handshake") from None
            except BaseException:
                writer.close()
                raise
        return cls(reader, writer, hands.codec(client=True), address)

    @classmethod
    async def accept(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
    ) -> AsyncChannel:
        """As `Channel.accept`; for what `door.serve` calls."""
        sock = writer.get_extra_info("socket")
        peer = _peer_name(sock, sock.family)
        hands = _Handshake(secret, peer)
        loop, transport = asyncio.get_running_loop(), writer.transport
        try:
            with lobby.stay(lambda: _at(loop, transport.abort)):
                _tune(sock, sock.family)
                writer.write(hands.hello)
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    answer = await reader.readexactly(_Handshake.ANSWER_BYTES)
                try:
                    writer.write(hands.admit(answer))
                except AuthenticationError:
                    writer.write(_REFUSED)
                    raise
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise AuthenticationError(f"{peer} did not finish the handshake: {error}") from error
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, hands.codec(client=False), peer)

    def post(self, message: dict[str, Any]) -> None:
        """Queue a message without waiting. Raises ConnectionError if closed or the peer takes nothing."""
        if self._writer.is_closing():
            raise ConnectionResetError(f"the connection to {self.peer} is closed")
        if self._writer.transport.get_write_buffer_size() > MAX_JSON:
            self._writer.transport.abort()
            raise ConnectionResetError(
                f"{self.peer} takes nothing, {MAX_JSON >> 20} MiB wait for it: given up"
            )
        self._writer.write(self._codec.pack(_Codec.encode(message), 0))

    async def send(self, message: dict[str, Any]) -> None:
        self.post(message)
        try:
            await self._writer.drain()
        except OSError as error:
            raise _lost(self.peer, error) from error

    async def recv(self) -> dict[str, Any]:
        """The next message; may be cancelled and called again. Errors as in `Channel.recv`."""
        try:
            if self._header is None:
                self._header = await self._reader.readexactly(_HEADER.size)
            body = await self._reader.readexactly(self._codec.body_bytes(self._header))
            message, payload_bytes = self._codec.open(self._header, body)
            if payload_bytes:
                raise ProtocolError(f"{self.peer} sent a payload over a control connection")
        except asyncio.IncompleteReadError:
            self.close()
            raise ConnectionResetError(f"{self.peer} closed the connection") from None
        except OSError as error:
            self.close()
            raise _lost(self.peer, error) from error
        except (ProtocolError, AuthenticationError):
            self.close()
            raise
        self._header = None
        return message

    def close(self) -> None:
        self._writer.close()
