"""That a node lives, said by a small process beside its agent that nothing of the agent's work holds up.

It is forked before the agent has any thread, shares its memory, and does nothing but tell the controller how
long ago the agent's event loop last went round. So a machine that is gone can be told from an agent that is
busy, and nobody is told that an agent lives whose loop is dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import signal
import time
from typing import NoReturn

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import handshake
from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import FROM_CONTROLLER, Pulse, PulseHello

_PR_SET_PDEATHSIG = 1
_SLOWLY = 5.0
"""Seconds that the controller's machine may take a pulse in."""
_ADDRESS = 300
"""Bytes of a controller's address, at most."""


class Loop:
    """How long ago the agent's event loop went round, and whom it has met; shared with processes that are
    forked later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 + _ADDRESS)
        self._turned, self._length = (ctypes.c_int64.from_buffer(self._memory, at) for at in (0, 8))
        self.turned()

    def turned(self) -> None:
        """It has gone round."""
        self._turned.value = time.monotonic_ns()

    def stalled(self) -> float:
        """Seconds."""
        return max(0.0, (time.monotonic_ns() - self._turned.value) / 1e9)

    def met(self, address: str) -> None:
        """The agent has heard from its controller there."""
        text = address.encode()[:_ADDRESS]
        if self._memory[16 : 16 + len(text)] != text or self._length.value != len(text):
            self._length.value = 0
            self._memory[16 : 16 + len(text)] = text
            self._length.value = len(text)

    @property
    def controller(self) -> str:
        """The address of the controller that the agent has met last; empty before."""
        return self._memory[16 : 16 + self._length.value].decode(errors="replace")


def start(loop: Loop, secret: bytes, node: str, every: float) -> int:
    """Fork it. Returns its pid. It ends with this process, at the latest."""
    agent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        logging.disable(logging.CRITICAL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _serve(agent, loop, secret, node, every)
    finally:
        os._exit(1)


def _serve(agent: int, loop: Loop, secret: bytes, node: str, every: float) -> NoReturn:
    while True:
        # Another one may lead by now; the agent will say so if something is wrong.
        with contextlib.suppress(OSError, AuthenticationError, ProtocolError):
            if controller := loop.controller:
                channel = Channel.connect(controller, secret, FROM_CONTROLLER, handshake.SECONDS)
                try:
                    channel.settimeout(_SLOWLY)
                    channel.send(PulseHello(node))
                    while os.getppid() == agent and loop.controller == controller:
                        channel.send(Pulse(loop.stalled()))
                        time.sleep(every)
                finally:
                    channel.close()
        if os.getppid() != agent:
            os._exit(0)
        time.sleep(every)
