"""The checksums of a snapshot's chunks, for its worker and for its node's agent, which is without torch."""

from __future__ import annotations

import xxhash

from ft_core.errors import CorruptSnapshot
from ft_core.state import threads
from ft_core.state.manifest import CHUNK
from ft_core.state.memory import SnapshotBuffer

_RUN = 8
"""Chunks that a thread checks one after the other."""


def hash_of(data: memoryview, chunk: int) -> int:
    """The checksum of a chunk of a segment's bytes."""
    return xxhash.xxh3_64_intdigest(data[chunk * CHUNK : (chunk + 1) * CHUNK])


def verify(buffer: SnapshotBuffer) -> None:
    """Check every chunk against its checksum. Raises CorruptSnapshot naming the first bad one.

    Also of what this node's agent has just fetched and verified: by several threads it takes hardly longer
    than to map the pages, which has to be done for the load, and it is the bytes that are loaded that are
    checked, by whoever loads them.
    """
    runs = [
        (index, range(first, min(first + _RUN, segment.chunks)))
        for index, segment in enumerate(buffer.segments)
        for first in range(0, segment.chunks, _RUN)
    ]
    bad: list[tuple[int, int]] = []

    def check(number: int) -> None:
        index, chunks = runs[number]
        data, sums = buffer.data(index), buffer.checksums(index)
        bad.extend((index, chunk) for chunk in chunks if hash_of(data, chunk) != sums[chunk])

    threads.each(len(runs), check)
    if bad:
        index, chunk = min(bad)
        raise CorruptSnapshot(
            f"local snapshot of version {buffer.version}: chunk {chunk} of segment "
            f"{buffer.segments[index].id} does not match its checksum; this copy is not used"
        )
