"""The Megatron recipe, which rests in every step, and says when each is done: for `benchmarks.succession`.

`FT_STEPS` is a directory. Steps are written to `steps` there, a line each, by every role: step and time. Once
there is a file `enough`, it does not rest any more. What is trained is the same.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from recipes.megatron import pretrain_gpt_core as recipe

REST = 0.1
"""Seconds."""


class Trainer(recipe.Trainer):
    """Rests within the forward pass."""

    def forward_step(self, *args: Any) -> Any:
        """As the recipe's."""
        if not (Path(os.environ["FT_STEPS"]) / "enough").exists():
            time.sleep(REST / self.args.num_microbatches)
        return super().forward_step(*args)

    def log_step(self, *result: Any) -> None:
        """As the recipe's."""
        super().log_step(*result)
        if not self.training.replaying:
            with (Path(os.environ["FT_STEPS"]) / "steps").open("a") as file:
                file.write(f"{self.training.step} {time.monotonic():.6f}\n")


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
