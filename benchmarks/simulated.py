"""What simulated agents and simulated members of communicators have in common: how the roles of a Megatron
job are laid out, and one end of a real connection."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Self

from ft_core.protocol.codec import encode
from ft_core.protocol.framing import HEADER, Frames
from ft_core.protocol.handshake import Handshake
from ft_core.protocol.messages import Message
from ft_core.protocol.sockets import listener_of

LAYOUTS = {"data": (1, 1), "model": (8, 16)}
"""Tensor and pipeline parallel size."""
PER_NODE = 8
"""Roles."""
AT_ONCE = 64
"""Connections that one process makes at once: who has another core for each member says who it is as soon as
there is a connection; here it may take longer than a server waits for a stranger, if there are many.
"""
AGAIN = 0.05
"""Seconds until the next try to connect."""


@dataclass(frozen=True)
class Layout:
    """`tensor` roles in a row share a layer, `pipeline` stages come last, as Megatron counts ranks."""

    roles: int
    tensor: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, name: str, roles: int) -> Self:
        """One of `LAYOUTS`, of whole nodes and replicas: of so many roles, or some more."""
        tensor, pipeline = LAYOUTS[name]
        unit = math.lcm(tensor * pipeline, PER_NODE)
        return cls(-(-roles // unit) * unit, tensor, pipeline)

    @property
    def data(self) -> int:
        """How many replicas of the model there are."""
        return self.roles // (self.tensor * self.pipeline)

    def peers(self, role: int) -> range:
        """The roles with the same parameters."""
        stage = self.tensor * self.data
        first = role // stage * stage + role % self.tensor
        return range(first, first + stage, self.tensor)

    def neighbours(self, role: int) -> set[int]:
        """Roles that have connections with it all the time: those before and after it in rings of
        its data-parallel peers, and in the pipeline."""
        peers, stage = self.peers(role), self.tensor * self.data
        place = peers.index(role)
        ring = {peers[place - 1], peers[(place + 1) % len(peers)]}
        return (ring | {(role + way) % self.roles for way in (-stage, stage)}) - {role}

    def groups(self, role: int) -> list[list[range]]:
        """All roles, data, tensor, pipeline and model parallel; those of more than one. Each as its runs."""
        stage = self.tensor * self.data
        first = role // self.tensor * self.tensor
        # The replica of the model that the role is of: its tensor groups in all stages.
        model = [range(t, t + self.tensor) for t in range(first % stage, self.roles, stage)]
        single = [
            range(self.roles),
            self.peers(role),
            range(first, first + self.tensor),
            range(role % stage, self.roles, stage),
        ]
        return [runs for runs in [*([run] for run in single), model] if sum(map(len, runs)) > 1]


class Client(asyncio.Protocol):
    """Of a real server of this job: shakes hands, and is given what it says, message by message."""

    def __init__(self, secret: bytes, server: str) -> None:
        self._secret, self._server = secret, server
        self._hands: Handshake | None = None
        self._frames: Frames | None = None
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def greets(self) -> None:
        """It may send."""
        raise NotImplementedError

    def came(self, nbytes: int) -> None:
        """So many bytes have."""
        raise NotImplementedError

    def heard(self, body: bytes) -> None:
        """A message has come."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._frames, self._buffer = transport, None, bytearray()
        listener = listener_of(transport.get_extra_info("peername"))
        self._hands = Handshake(self._secret, self._server, listener, client=True)
        transport.write(self._hands.hello)

    def data_received(self, data: bytes) -> None:
        self.came(len(data))
        self._buffer += data
        if self._frames is None and not self._shake():
            return
        at, buffer = 0, self._buffer
        while len(buffer) - at >= HEADER.size:
            _, length, _, _ = HEADER.unpack_from(buffer, at)
            if len(buffer) - at < HEADER.size + length:
                break
            at += HEADER.size
            self.heard(bytes(buffer[at : at + length]))
            at += length
        del buffer[:at]

    def _shake(self) -> bool:
        hands, buffer = self._hands, self._buffer
        assert hands is not None and self._transport is not None
        if len(buffer) >= hands.HELLO_BYTES and not hands._nonces:
            self._transport.write(hands.answer(bytes(buffer[: hands.HELLO_BYTES])))
            del buffer[: hands.HELLO_BYTES]
        if not hands._nonces or len(buffer) < hands.PROOF_BYTES:
            return False
        hands.confirm(bytes(buffer[: hands.PROOF_BYTES]))
        del buffer[: hands.PROOF_BYTES]
        self._frames = hands.frames()
        self.greets()
        return True

    def send(self, *messages: Message) -> None:
        """Nothing happens if there is no connection."""
        self.send_encoded(*map(encode, messages))

    def send_encoded(self, *bodies: bytes) -> None:
        """The same."""
        if self._frames is not None and self._transport is not None:
            self._transport.write(b"".join(map(self._frames.pack, bodies)))
