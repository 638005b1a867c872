"""The DeepSpeed recipes, telling what each snapshot consists of and what a step puts on the wire.

Prints lines `WHAT ROLE JSON`. `counted`: [step, {"allreduce": 3, ...}], the collectives that real process
groups are given (see wire.py) from the logging of the step before to that of this one. Under `ftrun`, at
the end: `snapshot`: [[holders, bytes], ...] for each snapshot; `segment`: [holders, [[name, shape, bytes],
...]] for each segment of the last one; `parameters`: their sizes. Then it waits for the file `go` of its job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pretrain_clm
import pretrain_pipeline
import torch.distributed as dist
from wire import count, counts

from ft_core.state import snapshot

snapshots: list[Any] = []


def say(what: str, value: Any) -> None:
    """One line for the test."""
    sys.stdout.write(f"{what} {dist.get_rank()} {json.dumps(value)}\n")
    sys.stdout.flush()


def recording(original: Any) -> Any:
    """`original`, which lays out a snapshot, recorded."""

    def method(*args: Any) -> Any:
        snapshots.append(original(*args))
        return snapshots[-1]

    return method


def measured(recipe: Any) -> type:
    """The recipe's trainer, measured."""

    class Trainer(recipe.Trainer):
        def log_step(self, step: int, *args: Any) -> None:
            if step > 1:  # what comes before is start-up
                say("counted", [step, counts])
            counts.clear()
            super().log_step(step, *args)

        def train(self) -> None:
            super().train()
            if (job := os.environ.get("FT_JOB_DIR")) is None:
                return
            for segments in snapshots:
                say("snapshot", [[s.holders, s.nbytes] for s in segments])
            for s in snapshots[-1]:
                say("segment", [s.holders, [[i.name, i.shape, i.nbytes] for i in s.items]])
            # ZeRO-3 leaves empty parameters behind, and their size.
            parameters = self.engine.module.parameters()
            say("parameters", [getattr(p, "ds_numel", p.numel()) for p in parameters])
            while not (Path(job) / "go").exists():
                time.sleep(0.02)

    return Trainer


def main() -> None:
    """As the recipe's."""
    count()
    snapshot.Snapshotter._segments = recording(snapshot.Snapshotter._segments)
    pipeline = any(argument.startswith("--num-stages") for argument in sys.argv)
    recipe = pretrain_pipeline if pipeline else pretrain_clm
    recipe.Trainer = measured(recipe)
    recipe.main()


if __name__ == "__main__":
    main()
