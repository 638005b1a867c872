"""That a node lives, said by a small process beside its agent that nothing of the agent's work holds up.

It is forked before the agent has any thread, shares its memory, and does nothing but tell the controller how
long ago the agent's event loop last went round. So a machine that is gone can be told from an agent that is
busy, and nobody is told that an agent lives whose loop is dead.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import time
from typing import NoReturn

from ft_core.protocol.messages import Pulse
from ft_core.protocol.pulses import Seal, sender

_PR_SET_PDEATHSIG = 1
_CONTROLLER = 400
"""Bytes of a controller's address and session, at most."""


class Loop:
    """How long ago the agent's event loop went round, and whom it has met; shared with processes that are
    forked later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 + _CONTROLLER)
        self._turned, self._length = (ctypes.c_int64.from_buffer(self._memory, at) for at in (0, 8))
        self.turned()

    def turned(self) -> None:
        """Note that the event loop has gone round."""
        self._turned.value = time.monotonic_ns()

    def stalled(self) -> float:
        """Seconds."""
        return max(0.0, (time.monotonic_ns() - self._turned.value) / 1e9)

    def met(self, address: str, session: str) -> None:
        """The agent has heard from its controller there, which calls itself so."""
        text = f"{session} {address}".encode()[:_CONTROLLER]
        if self._memory[16 : 16 + len(text)] != text or self._length.value != len(text):
            self._length.value = 0
            self._memory[16 : 16 + len(text)] = text
            self._length.value = len(text)

    @property
    def controller(self) -> tuple[str, str]:
        """Address and session of the controller that the agent has met last; empty before."""
        text = self._memory[16 : 16 + self._length.value].decode(errors="replace")
        session, _, address = text.partition(" ")
        return address, session


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
    seal, sock, whom = Seal(secret), None, ("", "")
    while os.getppid() == agent:
        try:
            if sock is None or loop.controller != whom:
                if sock is not None:
                    sock.close()
                whom, sock = loop.controller, None
                sock = sender(whom[0]) if whom[0] else None
            if sock is not None:
                sock.send(seal.pack(Pulse(whom[1], node, time.monotonic_ns(), loop.stalled())))
        except (OSError, ValueError):
            # The agent tells what is wrong; a name may be another machine's by now.
            if sock is not None:
                sock.close()
            sock = None
        time.sleep(every)
    os._exit(0)
