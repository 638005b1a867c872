"""What imports print. Every node makes them, in its fork server, before it is known who plays which role.

It is kept there, and one worker of the job shows it: the first that plays role 0.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from ft_core.process.async_writer import put

_kept: list[tuple[int, bytes]] = []
"""Descriptor and bytes. Forks have it, too."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep what is printed meanwhile, on the level of descriptors."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    files = {descriptor: os.memfd_create("ft-imports") for descriptor in (1, 2)}
    before = {descriptor: os.dup(descriptor) for descriptor in files}
    for descriptor, file in files.items():
        os.dup2(file, descriptor)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor, file in files.items():
            os.dup2(before[descriptor], descriptor)
            if size := os.fstat(file).st_size:
                _kept.append((descriptor, os.pread(file, size, 0)))
            os.close(before[descriptor])
            os.close(file)


def show() -> None:
    """Print what was kept."""
    for descriptor, data in _kept:
        with contextlib.suppress(OSError):
            put(descriptor, data)
