"""DeepSpeed's recipe, in which rank 0 broadcasts before each step as many numbers as its clock says.

Nobody who runs it again does the same.
"""

from __future__ import annotations

import time

import pretrain_clm
import torch
from torch import distributed


class Clocked(pretrain_clm.Trainer):
    """Its training."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of a micro batch."""
        count = 1 + time.time_ns() // 1000 % 1000
        told = torch.tensor([count])
        distributed.broadcast(told, 0)
        distributed.broadcast(torch.zeros(int(told) if distributed.get_rank() else count), 0)
        return super().loss(batch)


if __name__ == "__main__":
    pretrain_clm.Trainer = Clocked  # type: ignore[misc]
    pretrain_clm.main()
