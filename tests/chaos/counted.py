"""The recipe, counting what goes out on the wire: every collective that a real process group is given.

Counts where torch itself (and, under `ftrun`, the repairable group's inner communicator) hands an
operation to the backends. Prints `counted RANK STEP {"allreduce": 3, ...}` for all that happens from the
start of a step to the start of the next.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pretrain_gpt_core as recipe
import torch.distributed as dist

from ft_core.comm.collectives import COLLECTIVES

METHODS = [*COLLECTIVES, "_start_coalescing", "_end_coalescing"]
counts: Counter[str] = Counter()


def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, counted."""

    def method(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    return method


class Trainer(recipe.Trainer):
    """Prints what the step before took."""

    def train_step(self, step: int) -> Any:
        """As the recipe's."""
        if step:
            sys.stdout.write(f"counted {dist.get_rank()} {step - 1} {json.dumps(counts, sort_keys=True)}\n")
        counts.clear()
        return super().train_step(step)


if __name__ == "__main__":
    for method in METHODS:
        if hasattr(dist.ProcessGroup, method):
            setattr(dist.ProcessGroup, method, counting(method, getattr(dist.ProcessGroup, method)))
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
