"""Ports that stay free until somebody listens there."""

from __future__ import annotations

import contextlib
import random
import socket

_dice = random.Random()


def free_port() -> int:
    """One below those that the kernel gives to connections: no other program comes by it a moment later, nor
    does who connects to it while nobody listens get himself for an answer."""
    while True:
        port = _dice.randrange(15000, 30000)
        with contextlib.suppress(OSError), socket.socket() as tcp:
            tcp.bind(("127.0.0.1", port))
            with socket.socket(type=socket.SOCK_DGRAM) as udp:
                udp.bind(("127.0.0.1", port))
                return port
