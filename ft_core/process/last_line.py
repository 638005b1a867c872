"""Whether the last line on the console has no end yet: a progress bar, which an agent has copied there.

The processes of a job that `ftrun` has started share its console, and what one of them has to say is to begin
a line. So they share a byte of memory, too: who leaves a line without an end sets it. If two do at once, a
line is empty, or not one of its own; nobody waits for anybody.
"""

from __future__ import annotations

import argparse
import mmap
import os

_shared, _descriptor = mmap.mmap(-1, 1), -1


def make() -> int:
    """The descriptor of such a byte, for processes that are started."""
    descriptor = os.memfd_create("last-line")
    os.ftruncate(descriptor, 1)
    return descriptor


def add_argument(parser: argparse.ArgumentParser) -> None:
    """`--last-line`, for processes that `ftrun` starts."""
    parser.add_argument("--last-line", type=int, default=-1, help="descriptor of memory that is shared")


def share(descriptor: int) -> None:
    """With whoever has started this process."""
    global _shared, _descriptor
    if descriptor >= 0:
        _shared, _descriptor = mmap.mmap(descriptor, 1), descriptor
        os.set_inheritable(descriptor, False)


def argument() -> str:
    """For a process that takes the place of this one."""
    if _descriptor >= 0:
        os.set_inheritable(_descriptor, True)
    return f"--last-line={_descriptor}"


def leave_open() -> None:
    """What was written last has no end."""
    _shared[0] = 1


def begins() -> bool:
    """A line begins; returns whether the one before has no end yet."""
    unfinished, _shared[0] = bool(_shared[0]), 0
    return unfinished
