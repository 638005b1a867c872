"""What this machine can do at best with as many bytes: copy them, and send them to another process."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import torch

_PIECE = 1 << 20
_RUNS = 3


def copy(nbytes: int) -> float:
    """GB/s of a copy of so many bytes, in pages that are there; one thread, the best of three."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return max(_rate(nbytes, lambda: target.copy_(source)) for _ in range(_RUNS))
    finally:
        torch.set_num_threads(threads)


def tcp(nbytes: int) -> float:
    """GB/s of one TCP connection over loopback, from memory to memory; the best of three."""
    return max(_stream(nbytes) for _ in range(_RUNS))


def cpu(copied: int, sent: int) -> float:
    """CPU seconds that it takes to copy so many bytes, and to send and receive so many; the best of three."""
    source, target = np.ones(copied, np.uint8), np.ones(copied, np.uint8)
    found = []
    for _ in range(_RUNS):
        began = time.process_time()
        np.copyto(target, source)
        _stream(sent)
        found.append(time.process_time() - began)
    return min(found)


def _stream(nbytes: int) -> float:
    data, into = bytearray(_PIECE), bytearray(_PIECE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

    def send() -> None:
        with sender:
            for _ in range(nbytes // _PIECE):
                sender.sendall(data)

    def receive() -> None:
        with receiver:
            while receiver.recv_into(into):
                pass

    thread = threading.Thread(target=send)  # both calls leave the interpreter's lock
    began = time.perf_counter()
    thread.start()
    receive()
    thread.join()
    return nbytes / (time.perf_counter() - began) / 1e9


def _rate(nbytes: int, action: object) -> float:
    assert callable(action)
    began = time.perf_counter()
    action()
    return nbytes / (time.perf_counter() - began) / 1e9
