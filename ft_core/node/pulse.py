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


class Loop:
    """How long ago the agent's event loop went round: words that are shared with processes forked later."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, 16)
        self._turned, self._met = (ctypes.c_int64.from_buffer(memory, at) for at in (0, 8))
        self.turned()

    def turned(self) -> None:
        """It has gone round."""
        self._turned.value = time.monotonic_ns()

    def stalled(self) -> float:
        """Seconds."""
        return max(0.0, (time.monotonic_ns() - self._turned.value) / 1e9)

    def met(self) -> None:
        """The agent has been told something by its controller: whoever is at its address is that."""
        self._met.value = 1

    @property
    def has_met(self) -> bool:
        """Whether that is so."""
        return bool(self._met.value)


def start(loop: Loop, controller: str, secret: bytes, node: str, every: float) -> int:
    """Fork it. Returns its pid. It ends with this process, at the latest."""
    agent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        logging.disable(logging.CRITICAL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _serve(agent, loop, controller, secret, node, every)
    finally:
        os._exit(1)


def _serve(agent: int, loop: Loop, controller: str, secret: bytes, node: str, every: float) -> NoReturn:
    while not loop.has_met and os.getppid() == agent:
        time.sleep(every)
    while True:
        with contextlib.suppress(OSError, AuthenticationError, ProtocolError):  # the agent will say so
            channel = Channel.connect(controller, secret, FROM_CONTROLLER, handshake.SECONDS)
            try:
                channel.settimeout(_SLOWLY)
                channel.send(PulseHello(node))
                while os.getppid() == agent:
                    channel.send(Pulse(loop.stalled()))
                    time.sleep(every)
            finally:
                channel.close()
        if os.getppid() != agent:
            os._exit(0)
        time.sleep(every)
