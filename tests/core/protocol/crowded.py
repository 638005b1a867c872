"""Run by test_door.py: somebody connects while this process cannot open another file.

He still waits when it can. The argument says who accepts connections, a thread or an event loop.
"""

from __future__ import annotations

import asyncio
import os
import queue
import resource
import socket
import sys
import threading
import time

from ft_core.protocol import acceptor
from ft_core.protocol.connection import Connection
from ft_core.protocol.handshake import Handshake

found: queue.Queue[bool] = queue.Queue()
ready = threading.Event()
sock = socket.create_server(("127.0.0.1", 0))


def take() -> None:
    for _ in acceptor.connections(sock, b"a secret", "node a", lambda: False):
        found.put(True)


async def serve() -> None:
    async def connected(connection: Connection) -> None:
        found.put(True)

    ready.set()
    await acceptor.serve(sock, b"a secret", "node a", connected)


def main(kind: str) -> None:
    client = socket.socket()
    thread = threading.Thread(target=take, daemon=True)
    if kind == "loop":  # which needs some itself
        threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
        ready.wait()
        while sock.gettimeout() is None:
            time.sleep(0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as free:
        lowest = free.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    client.connect(sock.getsockname())
    client.sendall(bytes(Handshake.HELLO_BYTES))
    if kind == "thread":  # not before: who waits in accept() has a descriptor for it already
        thread.start()
    try:
        found.get(timeout=0.5)
    except queue.Empty:
        print("nobody came in", end="; ", flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found.get(timeout=30)
    print("then somebody did", flush=True)
    os._exit(0)


main(sys.argv[1])
