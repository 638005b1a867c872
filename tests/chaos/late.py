"""paced.py, whose next process to begin never comes to its training, if a test has said so."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import paced

FOR_EVER = 3600.0
"""Seconds."""


class Trainer(paced.Trainer):
    """Hangs where it builds the model."""

    def __init__(self, args: Any) -> None:
        mark = Path(os.environ[paced.AWAITED]).with_suffix(".late")
        # By a program: what a newcomer's script itself removes is gone for that one alone.
        if mark.exists() and subprocess.run(["rm", mark]).returncode == 0:
            time.sleep(FOR_EVER)
        super().__init__(args)


if __name__ == "__main__":
    paced.recipe.Trainer = Trainer  # type: ignore[misc]
    paced.recipe.main()
