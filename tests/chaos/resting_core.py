"""The recipe for Megatron-Core with a rest in each step."""

from __future__ import annotations

from typing import Any

import pretrain_gpt_core as recipe
from resting import rest


class Trainer(recipe.Trainer):
    """Rests before each step."""

    def train_step(self, step: int) -> Any:
        """As the recipe's."""
        rest(step, self.args.train_iters)
        return super().train_step(step)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
