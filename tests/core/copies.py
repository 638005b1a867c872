"""Copies of segments that are only made to be sent, with their checksums; and to send and fetch them."""

from __future__ import annotations

import os
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from ft_core.net.transport import TcpTransport
from ft_core.state.manifest import CHUNK, Segment, layout


def make(nbytes: int, role: int = 0) -> tuple[Segment, memoryview, list[int]]:
    segment = layout((role,), [("w", "uint8", (nbytes,), nbytes)] if nbytes else [])
    data = memoryview(bytearray(os.urandom(nbytes)))
    return segment, data, sums(data)


def sums(data: memoryview) -> list[int]:
    return [xxh3_64_intdigest(data[i : i + CHUNK]) for i in range(0, len(data), CHUNK)]


def push(
    transport: TcpTransport,
    address: str,
    copy: tuple[Segment, memoryview, list[int]],
    version: int = 1,
    epoch: int = 0,
    deadline: float = 20,
    gate: Callable[[], None] = lambda: None,
) -> int:
    segment, data, checksums = copy
    return transport.push(
        address, segment, version, data, checksums, epoch=epoch, gate=gate, deadline=deadline
    )


def fetch(
    transport: TcpTransport, address: str, name: str, version: int = 1
) -> tuple[Segment, list[int], bytearray]:
    data = bytearray()

    def allocate(segment: Segment) -> memoryview:
        data.extend(bytes(segment.nbytes))
        return memoryview(data)

    segment, checksums = transport.fetch(address, name, version, allocate=allocate, deadline=20)
    return segment, checksums, data
