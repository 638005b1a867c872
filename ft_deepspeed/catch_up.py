"""A newcomer's script on its way through steps that are done: its calls are answered from the record.

What it prints was printed before, and what it saves, too; and it would save a later state than it means. A
file that it would only now have written is not moved to where the good one is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from typing import Any

from ft_deepspeed import patched

_FILE = ("f", "file", "filename")
"""What functions that save call it."""


class CatchUp:
    """From construction to `close` the script's output, and what it saves, go nowhere."""

    def __init__(self) -> None:
        self.until = 0
        """The version whose state is loaded: when the script has come there, it goes live."""
        self.envelope: Any = None
        """Counters, random states and schedules of that version."""
        self._undo = ExitStack()
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - closed in `close`
        self._undo.enter_context(redirect_stdout(self._undo.enter_context(nowhere)))
        self._unwritten: set[str] = set()
        saves = [(patched.SAVE, 1), (patched.SAVE_ARRAY, 0)]
        if "safetensors.torch" in sys.modules:
            saves.append((patched.SAVE_SAFELY, 1))
        for patch, at in saves:
            self._undo.enter_context(patch.replaced(partial(self._save, at)))
        for patch in patched.MOVES:
            self._undo.enter_context(patch.replaced(partial(self._move, patch.original())))

    def _save(self, at: int, *args: Any, **kwargs: Any) -> None:
        """`at`: which argument is the file."""
        where = args[at] if len(args) > at else next((kwargs[n] for n in _FILE if n in kwargs), None)
        if isinstance(where, (str, os.PathLike)):
            path = os.path.abspath(os.fsdecode(where))
            self._unwritten |= {path, f"{path}.npy"}  # as numpy would call it

    def _move(self, move: Callable[..., Any], source: Any, *args: Any, **kwargs: Any) -> Any:
        unwritten = isinstance(source, (str, os.PathLike))
        if unwritten and os.path.abspath(os.fsdecode(source)) in self._unwritten:
            return None
        return move(source, *args, **kwargs)

    def close(self) -> None:
        """The script is where the others are: put everything back that was replaced."""
        self._undo.close()
