"""The recipe with a bug: role 1 raises in its fourth step."""

from __future__ import annotations

from typing import Any

import pretrain_gpt_core as recipe
import torch


class Trainer(recipe.Trainer):
    """Raises what no recovery may swallow."""

    def train_step(self, step: int) -> Any:
        """As the recipe's."""
        if step == 3 and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("a bug of the user's")
        return super().train_step(step)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
