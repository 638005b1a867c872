"""A newcomer's script on its way through steps that are done: its calls are answered from the record.

What it prints was printed before. What it does to files is the business of `ft_core.overlay`.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, redirect_stdout
from typing import Any

_SAYS_AFTER = 5.0
"""Seconds."""


class CatchUp:
    """From construction to `close` the script's output goes nowhere."""

    def __init__(self, position: int) -> None:
        """`position`: steps that the script has done by now."""
        self.until = 0
        """The version whose state is loaded: when the script has come there, it goes live."""
        self.envelope: Any = None
        """Counters, random states and schedules of that version."""
        self._began = time.monotonic()
        self._from = position
        self._says_at = _SAYS_AFTER
        self._undo = ExitStack()
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - closed in `close`
        self._undo.enter_context(redirect_stdout(self._undo.enter_context(nowhere)))

    def progress(self, position: int) -> str | None:
        """What to say of the way to `position` now, if anything: after a few seconds, and whenever twice as
        much time has passed."""
        spent = time.monotonic() - self._began
        if spent < self._says_at:
            return None
        self._says_at = 2 * spent
        ahead = (self.until - position) * spent / (position - self._from)
        done = (
            f"{position - self._from} of {self.until - self._from} in {spent:.0f} s, some {ahead:.0f} s more"
        )
        return f"its script passes steps that are done ({done}); a loop on ProtectedTraining need not"

    def close(self) -> None:
        """The script is where the others are: put everything back that was replaced."""
        self._undo.close()
