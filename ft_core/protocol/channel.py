"""A blocking connection between two processes of the job."""

from __future__ import annotations

import socket
import threading
import time
from typing import Generic, TypeVar

from msgspec import Struct

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import handshake
from ft_core.protocol.acceptor import pending
from ft_core.protocol.codec import Decoder, encode
from ft_core.protocol.framing import HEADER, Frames
from ft_core.protocol.handshake import Handshake
from ft_core.protocol.sockets import (
    as_bytes,
    listener_of,
    peer_name,
    readable,
    receive,
    receive_exactly,
    send_all,
    shut,
    source_of,
    split_address,
    tune,
)

T = TypeVar("T")

_SCRATCH = 1 << 20


class Channel(Generic[T]):
    """Receives messages of type `T`.

    `send` may be called by several threads, receiving is for one thread at a time.

    After `recv`, `payload_bytes` bytes of payload follow: take them with `recv_payload_into` or
    `skip_payload` before the next `recv`. A lost connection raises ConnectionError, `settimeout`'s limit
    TimeoutError. After a time-out in `recv`, `recv` may be called again; other failures close the channel.
    """

    def __init__(self, sock: socket.socket, frames: Frames, receives: Decoder[T], peer: str) -> None:
        self.peer = peer
        self.payload_bytes = 0
        self._sock = sock
        self._frames = frames
        self._receives = receives
        self._timeout: float | None = None
        self._lock = threading.Lock()
        self._header = bytearray(HEADER.size)
        self._body: bytearray | None = None
        self._have = 0

    @classmethod
    def connect(cls, address: str, secret: bytes, receives: Decoder[T], timeout: float) -> Channel[T]:
        """Connect to "host:port" or "unix:/path" and shake hands, all within `timeout` seconds.

        Raises AuthenticationError if either side has another secret, or speaks another version of the
        protocol, ProtocolError if something else answers there, OSError (ConnectionError, TimeoutError) if
        nobody does or the peer leaves: only the latter is worth trying again at once.
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
            tune(sock, sock.family)
            end = min(end, time.monotonic() + handshake.SECONDS)
            hands = Handshake(secret, address, listener_of(sock.getpeername()), client=True)
            send_all(sock, memoryview(hands.hello), end, address)
            proof = hands.answer(receive_exactly(sock, Handshake.HELLO_BYTES, end, address))
            send_all(sock, memoryview(proof), end, address)
            hands.confirm(receive_exactly(sock, Handshake.PROOF_BYTES, end, address))
        except BaseException:
            sock.close()
            raise
        return cls(sock, hands.frames(), receives, address)

    @classmethod
    def accept(
        cls, sock: socket.socket, secret: bytes, receives: Decoder[T], timeout: float = handshake.SECONDS
    ) -> Channel[T]:
        """Shake hands as the server on an accepted socket, which is closed on failure.

        Raises AuthenticationError, whatever the reason: wrong secret, another version, silence,
        garbage, hanging up.
        """
        peer = peer_name(sock, sock.family)
        end = time.monotonic() + min(timeout, handshake.SECONDS)
        try:
            with pending.stay(source_of(sock), lambda: shut(sock), lambda: readable(sock.fileno())) as known:
                sock.settimeout(None)
                tune(sock, sock.family)
                hands = Handshake(secret, peer, listener_of(sock.getsockname()), client=False)
                send_all(sock, memoryview(hands.hello), end, peer)
                if claim := hands.meet(receive_exactly(sock, Handshake.HELLO_BYTES, end, peer)):
                    known(claim)
                theirs = receive_exactly(sock, Handshake.PROOF_BYTES, end, peer)
                try:
                    proof = hands.admit(theirs)
                except AuthenticationError:
                    send_all(sock, memoryview(handshake.REFUSED), end, peer)
                    raise
                send_all(sock, memoryview(proof), end, peer)
        except OSError as error:
            sock.close()
            raise AuthenticationError(f"{peer} did not finish the handshake: {error}") from error
        except BaseException:
            sock.close()
            raise
        return cls(sock, hands.frames(), receives, peer)

    def settimeout(self, seconds: float | None) -> None:
        """Every later call, as a whole, raises TimeoutError after this long; None waits for ever."""
        self._timeout = seconds

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def own_host(self) -> str:
        """The address of this end, of internet sockets."""
        return str(self._sock.getsockname()[0])

    def _end(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def send(self, message: Struct, payload: bytes | memoryview | None = None) -> None:
        """Send one frame. `payload` must be contiguous bytes; no copy of it is made."""
        body = encode(message)
        data = as_bytes(b"" if payload is None else payload)
        end = self._end()
        if not self._lock.acquire(timeout=-1 if self._timeout is None else self._timeout):
            raise TimeoutError(f"{self.peer} is still taking another thread's frame")
        try:
            frame = memoryview(self._frames.pack(body, len(data)))
            send_all(self._sock, frame, end, self.peer, socket.MSG_MORE if len(data) else 0)
            send_all(self._sock, data, end, self.peer)
        except BaseException:
            self.close()  # half a frame may be out: nothing that follows would make sense
            raise
        finally:
            self._lock.release()

    def recv(self) -> T:
        """The next message. AuthenticationError: the frame is not the peer's, or was altered; this closes the
        channel. ProtocolError: it is no frame, which does so too, or no message that is expected here, which
        the peer can still be told."""
        if self.payload_bytes:
            raise ProtocolError(f"{self.payload_bytes} payload bytes from {self.peer} were not taken")
        end = self._end()
        try:
            if self._body is None:
                self._fill(self._header, end)
                self._body, self._have = bytearray(self._frames.body_bytes(self._header)), 0
            self._fill(self._body, end)
            self.payload_bytes = self._frames.open(self._header, self._body)
        except TimeoutError:
            raise
        except BaseException:
            self.close()
            raise
        body, self._body, self._have = self._body, None, 0
        return self._receives.decode(body, self.peer)

    def _fill(self, buffer: bytearray, end: float | None) -> None:
        """Complete `buffer`; what came before a time-out stays for the next call."""
        with memoryview(buffer) as view:
            while self._have < len(view):
                self._have += receive(self._sock, view[self._have :], end, self.peer)

    def recv_payload_into(self, view: memoryview) -> None:
        """Fill `view`, contiguous, with the next `view.nbytes` bytes of the payload."""
        view = as_bytes(view)
        if len(view) > self.payload_bytes:
            raise ValueError(f"asked for {len(view)} payload bytes of {self.payload_bytes}")
        end = self._end()
        try:
            while len(view):
                count = receive(self._sock, view, end, self.peer)
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
        """End the connection, from any thread: whoever is blocked in this channel gets ConnectionError.
        `close` is still due."""
        shut(self._sock)

    def close(self) -> None:
        self.abort()
        self._sock.close()
