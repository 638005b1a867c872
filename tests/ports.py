"""Ports that stay free until somebody listens there."""

from __future__ import annotations

import contextlib
import random
import socket

_dice = random.Random()
_drawn: set[int] = set()
"""By this process: who has drawn one may not listen there yet."""


def free_port() -> int:
    """One below those that the kernel gives to connections: no other program comes by it a moment later, nor
    does who connects to it while nobody listens get himself for an answer. Another one each time."""
    while True:
        port = _dice.randrange(15000, 30000)
        with contextlib.suppress(OSError), socket.socket() as tcp:
            tcp.bind(("127.0.0.1", port))
            with socket.socket(type=socket.SOCK_DGRAM) as udp:
                udp.bind(("127.0.0.1", port))
            if port not in _drawn:
                _drawn.add(port)
                return port
