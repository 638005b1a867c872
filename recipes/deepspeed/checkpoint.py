"""DeepSpeed's checkpoints, with the random number generators, which it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def save(engine: Any, directory: Path) -> None:
    """Write a checkpoint of all ranks; the newest in a directory is the one that `load` takes."""
    tag = f"step{engine.global_steps}"
    path = _rng_path(directory, tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"cpu": torch.get_rng_state(), "device": get_accelerator().get_rng_state()}, path)
    engine.save_checkpoint(directory, tag=tag)


def load(engine: Any, directory: Path) -> None:
    """Take over the newest checkpoint in `directory`, if there is one: the same command starts a job, and
    starts it again."""
    found, _ = engine.load_checkpoint(directory)
    if found is None:
        return
    own = _rng_path(directory, f"step{engine.global_steps}")
    # A rank that was away when the checkpoint was written takes another's.
    states = torch.load(own if own.exists() else min(own.parent.glob("rng_*.pt")))
    torch.set_rng_state(states["cpu"])
    get_accelerator().set_rng_state(states["device"])


def _rng_path(directory: Path, tag: str) -> Path:
    return directory / tag / f"rng_{torch.distributed.get_rank()}.pt"
