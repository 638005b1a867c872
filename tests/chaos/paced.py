"""The recipe with a rest in every step, so that a test has time to do something to a job while it trains."""

from __future__ import annotations

import time
from typing import Any

import pretrain_gpt_core as recipe

REST = 0.05
"""Seconds. What is trained is the same."""


class Trainer(recipe.Trainer):
    """Rests within the forward pass."""

    def forward_step(self, *args: Any) -> Any:
        """As the recipe's."""
        time.sleep(REST / self.args.num_microbatches)
        return super().forward_step(*args)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
