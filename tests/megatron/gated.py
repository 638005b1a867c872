"""The recipe, stopped at step `GATE` until the file that `FT_TEST_GATE` names is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pretrain_gpt_core as recipe

GATE = 60


class Trainer(recipe.Trainer):
    """Waits in the forward pass. What is trained is the same."""

    def forward_step(self, *args: Any) -> Any:
        """As the recipe's."""
        while self.training.step == GATE and not Path(os.environ["FT_TEST_GATE"]).exists():
            time.sleep(0.05)
        return super().forward_step(*args)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
