"""Whether the process that has started this one still runs.

It is known by its number, which it tells: this process may take seconds to its first line, and whoever has
inherited it by then is not its parent.
"""

from __future__ import annotations

import argparse
import os

_parent = os.getppid()


def add_argument(parser: argparse.ArgumentParser) -> None:
    """`--parent`, for processes that `ftrun` starts."""
    parser.add_argument("--parent", type=int, default=_parent, help="the process that this one ends with")


def expect(pid: int) -> None:
    """Who has started this process."""
    global _parent
    _parent = pid


def argument() -> str:
    """For a process that takes the place of this one."""
    return f"--parent={_parent}"


def gone() -> bool:
    """Whether it has ended."""
    return os.getppid() != _parent
