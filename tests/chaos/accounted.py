"""The recipe, telling what each snapshot consists of. At the end it waits for `go` in the job directory.

Prints, for each role, `state ROLE BYTES COUNTERS`: what Megatron's optimizers on this rank have, main
parameters and their state, in tensors with dimensions and in scalars; and, for each snapshot,
`snapshot ROLE [[holders, bytes, items, envelope], ...]`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pretrain_gpt_core as recipe
import torch
import torch.distributed as dist

from ft_core.state import snapshot

rows: list[Any] = []


def recording(original: Any) -> Any:
    """`original`, which lays out a snapshot, recorded."""

    def method(*args: Any) -> Any:
        segments = original(*args)
        rows.append(
            [
                [
                    s.holders,
                    s.nbytes,
                    len(s.items),
                    sum(i.nbytes for i in s.items if i.name == snapshot.ENVELOPE),
                ]
                for s in segments
            ]
        )
        return segments

    return method


class Trainer(recipe.Trainer):
    """Prints the accounts at the end of training, and waits until they were checked."""

    def train(self) -> str:
        """As the recipe's."""
        digest: str = super().train()
        state = counters = 0
        for wrapper in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in wrapper.optimizer.param_groups:
                for main in group["params"]:
                    kept = [v for v in wrapper.optimizer.state[main].values() if isinstance(v, torch.Tensor)]
                    kept.append(main)
                    for tensor in kept:
                        size = tensor.numel() * tensor.element_size()
                        state += size if tensor.dim() else 0
                        counters += 0 if tensor.dim() else size
        sys.stdout.write(f"state {dist.get_rank()} {state} {counters}\n")
        for row in rows:
            sys.stdout.write(f"snapshot {dist.get_rank()} {json.dumps(row)}\n")
        sys.stdout.flush()
        while not (Path(os.environ["FT_JOB_DIR"]) / "go").exists():
            time.sleep(0.02)
        return digest


if __name__ == "__main__":
    snapshot.Snapshotter._segments = recording(snapshot.Snapshotter._segments)
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
