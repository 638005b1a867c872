"""What `test_gate.py` runs on two nodes: one sends snapshots and trains, the other takes both.

"Training" is a stream of bytes that does not end before it is told to: as an exchange that others wait for,
as long as the test needs it.
"""

from __future__ import annotations

import json
import socket
import sys
import threading

from core.copies import make

from ft_core.net.gate import FIRST, Gates
from ft_core.net.transport import TcpTransport
from ft_core.protocol.sockets import join_address, listen, split_address
from ft_core.state.replicas import ReplicaStore

SECRET = b"of two nodes"
SIZE = 12 << 20
LOOKS = 200


def receive(host: str) -> None:
    """Take what comes, for ever."""
    transport, server = TcpTransport(ReplicaStore(), SECRET, host=host), listen(host)
    print(transport.address, join_address(host, server.getsockname()[1]), flush=True)
    stream, _ = server.accept()
    while stream.recv(1 << 20):
        pass
    threading.Event().wait()


def send(host: str, peer: str, sink: str) -> None:
    """Send some snapshots, and one while training has the wire. Prints what became of that one."""
    transport, looks = TcpTransport(ReplicaStore(), SECRET, host=host), 0

    def own() -> int:
        nonlocal looks
        looks += 1
        return transport.sent_bytes

    gates = Gates(own)

    def push(version: int) -> None:
        segment, data, sums = make(SIZE)
        turn = gates.turn(0, 1000.0, lambda: True)
        transport.push(peer, segment, version, data, sums, epoch=0, gate=gates.to(peer, turn), deadline=100)
        gates.sent(0, turn)

    for version in range(FIRST):
        push(version)
    assert not looks
    stops, full = threading.Event(), threading.Event()
    training = threading.Thread(target=train, args=(sink, full, stops))
    training.start()
    full.wait()
    pushing = threading.Thread(target=push, args=(FIRST,))
    pushing.start()
    while looks < LOOKS and pushing.is_alive():
        pushing.join(0.01)
    waits = pushing.is_alive()
    stops.set()
    training.join()
    pushing.join()
    print(json.dumps({"waits": waits, "sent": transport.sent_bytes}), flush=True)
    transport.close()


def train(sink: str, full: threading.Event, stops: threading.Event) -> None:
    """Until it `stops`; the wire is `full` once more was sent than buffers and queues hold."""
    with socket.create_connection(split_address(sink)) as stream:
        piece, sent = bytes(1 << 16), 0
        while not stops.is_set():
            stream.sendall(piece)
            sent += len(piece)
            if sent > SIZE:
                full.set()


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
