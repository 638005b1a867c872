"""A newcomer's script on its way through steps that are done.

What it prints was printed before, and what it saves, too; and it would save a later state than it means.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

import torch


class Ghost:
    """From construction to `close` the script's output and `torch.save` go nowhere."""

    def __init__(self) -> None:
        self.until = 0
        """The version whose state is loaded: when the script has come there, it goes live."""
        self.envelope: Any = None
        """Counters, random states and schedules of that version."""
        self._stdout: TextIO = sys.stdout
        self._save = torch.save
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 - closed in `close`
        sys.stdout = self._nowhere
        torch.save = lambda *args, **kwargs: None

    def close(self) -> None:
        """It is there."""
        sys.stdout, torch.save = self._stdout, self._save
        self._nowhere.close()
