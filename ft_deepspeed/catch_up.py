"""A newcomer's script on its way through steps that are done: its calls are answered from the record.

What it prints was printed before. What it does to files is the business of `ft_core.overlay`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, redirect_stdout
from typing import Any


class CatchUp:
    """From construction to `close` the script's output goes nowhere."""

    def __init__(self) -> None:
        self.until = 0
        """The version whose state is loaded: when the script has come there, it goes live."""
        self.envelope: Any = None
        """Counters, random states and schedules of that version."""
        self._undo = ExitStack()
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - closed in `close`
        self._undo.enter_context(redirect_stdout(self._undo.enter_context(nowhere)))

    def close(self) -> None:
        """The script is where the others are: put everything back that was replaced."""
        self._undo.close()
