"""resting_clm.py, whose next process to begin takes its time for each batch, if a test has said so."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pretrain_clm as recipe
import resting_clm
from resting import AWAITED

SLOW = 1.3
"""Seconds."""


class Trainer(resting_clm.Trainer):
    """Its data are far away."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.never = threading.Event()  # a pause would not be made again
        try:
            Path(os.environ[AWAITED]).with_suffix(".slow").unlink()
        except FileNotFoundError:
            self.pace = 0.0
        else:
            self.pace = SLOW

    def loss(self, batch: Any) -> Any:
        """As the recipe's."""
        self.never.wait(self.pace)
        return super().loss(batch)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
