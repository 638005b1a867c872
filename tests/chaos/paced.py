"""The recipe with a rest in every step, so that a test has time to do something to a job while it trains: the
last steps take their time until the test waits for the job's end.

It keeps state of its own as well: prints `kept [STEPS, SUM]` in the end, with the sum of the losses.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pretrain_gpt_core as recipe
import torch

from ft_core.kept import keep

REST = 0.05
"""Seconds. What is trained is the same."""
LONGEST_REST, LAST = 2.0, 15
"""Seconds, less than any step has to take for a hang, and in how many of them."""
AWAITED = "FT_TESTS_AWAITED"
"""The environment variable that names the file which says that the end is waited for."""


total = torch.zeros(2, dtype=torch.float64)
keep(total=total)


class Trainer(recipe.Trainer):
    """Rests within the forward pass."""

    def train_step(self, step: int) -> Any:
        """As the recipe's."""
        result = super().train_step(step)
        total.add_(torch.tensor([1.0, result[0] or 0.0], dtype=torch.float64))
        return result

    def train(self) -> str:
        """As the recipe's."""
        digest = super().train()
        if self.is_logger:
            print(f"kept {total.tolist()!r}")
        return digest

    def forward_step(self, *args: Any) -> Any:
        """As the recipe's."""
        microbatches = self.args.num_microbatches
        time.sleep(REST / microbatches)
        if self.training.step >= self.args.train_iters - LAST and AWAITED in os.environ:
            until = time.monotonic() + LONGEST_REST / microbatches
            while not Path(os.environ[AWAITED]).exists() and time.monotonic() < until:
                time.sleep(REST)
        return super().forward_step(*args)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
