"""The Megatron recipe, one role of which hangs once, for `python -m benchmarks.hangs_whole`.

`FT_HANG=ROLE@STEP:KIND` says which, when and how; `FT_HANG_MARK` is a file that is made then, so that whoever
redoes the step does not hang again. Every step begins with an exchange and a broadcast over all roles, which
are what a role leaves out, or does twice.

`FT_STUTTER=SEED`: nothing hangs, but single roles take seconds now and then, or write for longer.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.hangs_how import HANGS
from recipes.megatron import pretrain_gpt_core as recipe


class Trainer(recipe.Trainer):
    """Hangs where it is told."""

    def train_step(self, step: int) -> Any:
        """As the recipe's."""
        kind = due(step)
        if kind in HANGS:
            HANGS[kind]()
        exchange(kind)
        if seed := os.environ.get("FT_STUTTER"):
            stutter(random.Random(f"{seed} {step}"), step)
        return super().train_step(step)


def stutter(dice: random.Random, step: int) -> None:
    """As loaders do, of one role in a hundred steps; and as rank 0 does that saves alone."""
    late, seconds = dice.randrange(distributed.get_world_size()), dice.uniform(0.2, 4.5)
    if dice.random() < 0.01 and distributed.get_rank() == late:
        time.sleep(seconds)
    if step % 2500 == 1250 and distributed.get_rank() == 0:
        with tempfile.TemporaryFile() as file:
            for _ in range(60):
                file.write(bytes(1 << 20))
                time.sleep(0.2)


def exchange(kind: str) -> None:
    """Over all roles."""
    number, other = torch.ones(2 if kind == "shape" else 1), torch.ones(1)
    if kind == "order":
        distributed.broadcast(other, 0)
    if kind != "skipped":
        distributed.all_reduce(number)
    if kind == "doubled":
        distributed.all_reduce(number)
    if kind != "order":
        distributed.broadcast(other, 0)


def due(step: int) -> str:
    """What is to happen in this step."""
    role, at, kind = re.fullmatch(r"(\d+)@(\d+):(\w+)", os.environ.get("FT_HANG", "0@0:none")).groups()  # type: ignore[union-attr]
    if kind == "none" or int(role) != distributed.get_rank() or int(at) != step:
        return ""
    try:
        with Path(os.environ["FT_HANG_MARK"]).open("x") as mark:
            mark.write(f"{time.monotonic()!r} {kind}")
    except FileExistsError:
        return ""
    return kind


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
