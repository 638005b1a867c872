"""The recipe, whose roles meet at the beginning of step `GATE`, between two collectives, until the file
`open` is in the directory that `FT_TEST_GATE` names. Each leaves a file there when it has come."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pretrain_gpt_core as recipe

GATE = 3


class Trainer(recipe.Trainer):
    """Waits. What is trained is the same."""

    def train_step(self, step: int) -> Any:
        """As the recipe's."""
        gate = Path(os.environ["FT_TEST_GATE"])
        if step == GATE:
            (gate / os.environ["RANK"]).touch()
            while not (gate / "open").exists():
                time.sleep(0.02)
        return super().train_step(step)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
