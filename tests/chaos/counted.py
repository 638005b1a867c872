"""The recipe, counting what goes out on the wire (see wire.py).

Prints `counted RANK STEP {"allreduce": 3, ...}` for all that happens from the start of a step to the start
of the next.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pretrain_gpt_core as recipe
import torch.distributed as dist
from wire import count, counts


class Trainer(recipe.Trainer):
    """Prints what the step before took."""

    def train_step(self, step: int) -> Any:
        """As the recipe's."""
        if step:
            sys.stdout.write(f"counted {dist.get_rank()} {step - 1} {json.dumps(counts, sort_keys=True)}\n")
        counts.clear()
        return super().train_step(step)


if __name__ == "__main__":
    count()
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
