"""Marks of a script's start-up in the process's time line, until training begins: what it makes.

A framework's names for these parts differ; that a process group, a module, an optimizer or a loader is made
does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ft_core.patched import MADE
from ft_core.process.timeline import timeline

_stack = ExitStack()


def install() -> None:
    """From here on, until `remove`."""
    for phase, patch in MADE.items():
        _stack.enter_context(patch.replaced(_marking(phase, patch.original())))


def remove() -> None:
    """Training begins: nothing is left of it."""
    _stack.close()


def _marking(phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        timeline.mark(phase)
        return original(*args, **kwargs)

    return make
