"""The recipe of Megatron-Core at the pace of random faults."""

from __future__ import annotations

from typing import Any

import pretrain_gpt_core as recipe  # type: ignore[import-not-found]

from benchmarks.soak_pace import rest


class Trainer(recipe.Trainer):
    """Rests within the first forward pass of a step."""

    rested = -1

    def forward_step(self, *args: Any) -> Any:
        """As the recipe's."""
        step = self.training.step
        if step != self.rested:
            self.rested = step
            rest(step, self.args.train_iters)
        return super().forward_step(*args)


if __name__ == "__main__":
    recipe.Trainer = Trainer
    recipe.main()
