"""How fast this node computes, copies memory and sends to itself: for a comparison with nodes alike.

On a host it is the thread's own processor time that counts: other processes that use the cores make it no
longer. What is slow in itself is judged by nobody here, see `control.liveness.outliers`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from ft_core.protocol.messages import NodeCheck, Soundness, Timing

LOOPBACK = "loopback"
_TIMES = 5
_EDGE, _COPIED = 384, 16 << 20
"""The side of a matrix, and bytes that are copied, on a host."""
_GPU_EDGE, _GPU_COPIED = 8192, 1 << 29
_SENT = 16 << 20
_PATIENCE = 5.0
"""Seconds that the loopback may be silent."""


class Measured(NamedTuple):
    """One figure: its name, the same on all nodes; how long it took; and in words."""

    name: str
    timing: Timing
    text: str


def of_host() -> Iterator[Measured]:
    """One core's arithmetic, and memory."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        factor, result = torch.ones(_EDGE, _EDGE), torch.empty(_EDGE, _EDGE)
        took = _timed(lambda: torch.mm(factor, factor, out=result))
        yield Measured("matmul", took, f"{2 * _EDGE**3 / took.best / 1e9:.0f} GFLOP/s on one core")
        source = torch.ones(_COPIED, dtype=torch.uint8)
        target = torch.empty_like(source)
        took = _timed(lambda: target.copy_(source))
        yield Measured("memory", took, f"{2 * _COPIED / took.best / 1e9:.1f} GB/s on one core")
    finally:
        torch.set_num_threads(threads)


def of_gpu(device: int) -> Iterator[Measured]:
    """Its arithmetic in bfloat16, and its memory."""
    import torch

    with torch.cuda.device(device):
        factor = torch.ones(_GPU_EDGE, _GPU_EDGE, dtype=torch.bfloat16, device="cuda")
        took = _timed_on_gpu(lambda: factor @ factor)
        figure = f"{2 * _GPU_EDGE**3 / took.best / 1e12:.0f} TFLOP/s on GPU {device}"
        yield Measured(f"matmul of GPU {device}", took, figure)
        source = torch.ones(_GPU_COPIED, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        took = _timed_on_gpu(lambda: target.copy_(source))
        figure = f"{2 * _GPU_COPIED / took.best / 1e9:.0f} GB/s on GPU {device}"
        yield Measured(f"memory of GPU {device}", took, figure)


def _timed(work: Callable[[], object]) -> Timing:
    work()  # memory is touched, and code is there
    took = []
    for _ in range(_TIMES):
        began = time.thread_time()
        work()
        took.append(time.thread_time() - began)
    return Timing(max(min(took), 1e-9), max(took))


def _timed_on_gpu(work: Callable[[], object]) -> Timing:
    import torch

    work()
    took = []
    for _ in range(_TIMES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    return Timing(max(min(took), 1e-9), max(took))


def loopback(host: str) -> Iterator[NodeCheck]:
    """Bytes that this node sends to its own address arrive as they were. Raises OSError."""
    data = bytes(range(256)) * (_SENT // 256)
    received = bytearray()

    def send(to: tuple[str, int]) -> None:
        with socket.create_connection(to, timeout=_PATIENCE) as out:
            out.sendall(data)

    with socket.create_server((host, 0), family=_family(host)) as server:
        server.settimeout(_PATIENCE)
        began = time.monotonic()
        sender = threading.Thread(target=send, args=(server.getsockname()[:2],), daemon=True)
        sender.start()
        with server.accept()[0] as there:
            there.settimeout(_PATIENCE)
            while block := there.recv(1 << 20):
                received += block
        sender.join(_PATIENCE)
    rate = f"{_SENT / (time.monotonic() - began) / 1e9:.1f} GB/s at {host}"
    if len(received) < _SENT:
        raise OSError(f"the connection of {host} with itself ended after {len(received)} bytes")
    if xxh3_64_intdigest(received) == xxh3_64_intdigest(data):
        yield NodeCheck(LOOPBACK, Soundness.OK, rate)
        return
    differ = sum(a != b for a, b in zip(received, data, strict=True))
    why = f"of {_SENT} bytes that were sent to itself {differ} came otherwise, and TCP did not notice"
    yield NodeCheck(LOOPBACK, Soundness.SICK, rate, why)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def hardware(gpus: int) -> str:
    """What nodes have in common that are to be as fast as each other."""
    if gpus:
        import torch

        return f"{gpus} x {torch.cuda.get_device_name(0)}"
    models = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return next(models, "a processor without a name")
