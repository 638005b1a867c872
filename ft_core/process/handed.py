"""What `ftrun` hands to each process that it starts: bytes that it would have to read from storage otherwise,
which may not be there when one takes the place of another.

They are in memory that the process inherits by its descriptor. No command line and no environment shows them,
as the job's secret is among them.
"""

from __future__ import annotations

import argparse
import os

_descriptor = -1


def make(content: bytes) -> int:
    """The descriptor of memory with this content, for processes that are started."""
    descriptor = os.memfd_create("handed")
    os.write(descriptor, content)
    return descriptor


def add_argument(parser: argparse.ArgumentParser) -> None:
    """`--handed`, for processes that `ftrun` starts."""
    parser.add_argument("--handed", type=int, default=-1, help="descriptor of memory with settings, secret")


def take(descriptor: int) -> bytes | None:
    """What whoever has started this process has handed to it; None if that is nothing."""
    global _descriptor
    if descriptor < 0:
        return None
    os.set_inheritable(descriptor, False)
    _descriptor = descriptor
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def argument() -> str:
    """For a process that takes the place of this one."""
    if _descriptor >= 0:
        os.set_inheritable(_descriptor, True)
    return f"--handed={_descriptor}"
