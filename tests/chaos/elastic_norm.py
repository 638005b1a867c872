"""Has Megatron add a gradient's norm up in the order in which a job does whose replica groups come and go.

There a rank sums up the squares of all shards that it holds, those that it has adopted included.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_told import taking_part
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def sum_as_held(ledger: Path, step: Callable[[], int]) -> None:
    """`step`: the one under way; `ledger`: of the job that is done once more."""
    names = (
        "get_main_grads_for_grad_norm",
        "get_grads_for_grad_norm",
    )  # up to megatron-core 0.18; from 0.19 on
    name = next(name for name in names if hasattr(DistributedOptimizer, name))
    own = getattr(DistributedOptimizer, name)

    def gathered(self: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        group, grads = self.data_parallel_group, own(self, *args, **kwargs)
        if self.ddp_config.num_distributed_optimizer_instances > 1:
            return grads
        there = taking_part(ledger, step())
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, grads, group=group)
        mine = grads if group.rank() in there else []
        for away in sorted(set(range(group.size())) - set(there)):
            holder = next(at for i in range(group.size()) if (at := (away + i) % group.size()) in there)
            if holder == group.rank():
                mine = [*mine, *found[away]]
        return mine

    setattr(DistributedOptimizer, name, gathered)
