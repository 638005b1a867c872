"""Who may talk to whom: those who know the job's secret, and speak the same version of the protocol.

At most 5 s, fixed sizes only, so that a stranger can make nobody allocate or wait:

    both           ->  magic, u32 version, 32-byte nonce
    client -> server   HMAC-SHA256(secret, "client", both nonces)
    server -> client   HMAC-SHA256(secret, "server", both nonces); 32 zero bytes and a close if it refuses

Half of a client's nonce is random and says when it was made, the other half is made of that, the secret, and
whom it is for: the server's port, or its path. Whoever overhears it can say it again there, once, and not
later: it admits nobody, but a server that is busy waits longer for whom it seems to know (`acceptor`).

Before it reads anything else, each side looks at the other's version, so both can say what is wrong. The
first line is the same in all versions. Both sides then derive one key per direction from the secret and the
nonces, see `framing`.
"""

from __future__ import annotations

import hmac
import os
import struct
import time

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol.framing import Frames

SECONDS = 5.0
PATIENCE = 30.0
"""Seconds for the handshake of members: thousands of them may come at once to a machine that is slow."""
VERSION = 29
"""The version of the protocol: another number as soon as any message, or the way it is sent, is another."""

FRESH = 60.0
"""Seconds for which a nonce shows who is known. A machine whose clock is wrong by more is a stranger until it
has shaken hands."""

REFUSED = bytes(32)

_MAGIC = b"FTRN"
_NONCE = 32
_HELLO = struct.Struct(f"!4sI{_NONCE}s")
_MADE = struct.Struct("!12sI")
"""The first half of a client's nonce: what was drawn, and seconds since 1970."""


def _nonce(secret: bytes, listener: bytes, own: bytes) -> bytes:
    """The client's that begins so."""
    return own + hmac.digest(secret, b"nonce" + own + listener, "sha256")[: _NONCE - len(own)]


def claim_of(secret: bytes, listener: bytes, hello: bytes) -> bytes:
    """The nonce in a client's hello, if who knows the secret has just made it for this server; or nothing."""
    theirs: bytes = _HELLO.unpack(hello)[2]
    own = theirs[: _MADE.size]
    is_fresh = abs(_MADE.unpack(own)[1] - time.time()) <= FRESH
    return theirs if is_fresh and hmac.compare_digest(theirs, _nonce(secret, listener, own)) else b""


class Handshake:
    """The bytes of one side's handshake, without the input and output."""

    HELLO_BYTES = _HELLO.size
    PROOF_BYTES = 32

    def __init__(self, secret: bytes, peer: str, listener: bytes, *, client: bool) -> None:
        """`listener`: as both ends know the server (`sockets.listener_of`)."""
        if not secret:
            raise ValueError("the job's secret is empty: every process could join")
        self._secret = secret
        self._peer = peer
        self._listener = listener
        self._client = client
        self._nonce = os.urandom(_NONCE)
        if client:
            own = _MADE.pack(self._nonce[:12], int(time.time()) & 0xFFFFFFFF)
            self._nonce = _nonce(secret, listener, own)
        self.hello = _HELLO.pack(_MAGIC, VERSION, self._nonce)
        self._nonces = b""

    def _mac(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, label + self._nonces, "sha256")

    def _theirs(self, hello: bytes) -> bytes:
        """The nonce in the other side's hello."""
        magic, version, nonce = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise ProtocolError(f"{self._peer} does not speak this protocol")
        if version != VERSION:
            raise AuthenticationError(
                f"{self._peer} speaks version {version} of the protocol, this process version {VERSION}: "
                "not talking to it. All of a job, and ftctl, must be of the same release of this package"
            )
        return bytes(nonce)

    def answer(self, hello: bytes) -> bytes:
        """Client: the proof that answers the server's hello. Raises AuthenticationError if that is of another
        version, ProtocolError if it is none."""
        self._nonces = self._theirs(hello) + self._nonce
        return self._mac(b"client")

    def meet(self, hello: bytes) -> bytes:
        """Server: the client's hello. Returns its nonce, if who knows the secret has just made it for this
        server; nothing if not. Raises AuthenticationError."""
        try:
            theirs = self._theirs(hello)
        except ProtocolError as error:
            raise AuthenticationError(str(error)) from None
        self._nonces = self._nonce + theirs
        return claim_of(self._secret, self._listener, hello)

    def admit(self, proof: bytes) -> bytes:
        """Server: its own proof, once the client's is right. Raises AuthenticationError."""
        if not hmac.compare_digest(proof, self._mac(b"client")):
            raise AuthenticationError(
                f"{self._peer} does not know this job's secret: connection refused (is its FT_JOB_SECRET "
                "this job's?)"
            )
        return self._mac(b"server")

    def confirm(self, proof: bytes) -> None:
        """Client: the server's last word. Raises AuthenticationError."""
        if proof == REFUSED:
            raise AuthenticationError(
                f"{self._peer} refused this process: its job has another secret; check the job's secret "
                "file, or FT_JOB_SECRET: all nodes need the same"
            )
        if not hmac.compare_digest(proof, self._mac(b"server")):
            raise AuthenticationError(f"{self._peer} does not know this job's secret: not talking to it")

    def frames(self) -> Frames:
        """The frames for what is said from now on."""
        up, down = self._mac(b"key up"), self._mac(b"key down")
        return Frames(up, down, self._peer) if self._client else Frames(down, up, self._peer)
