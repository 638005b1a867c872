"""The recipe of DeepSpeed at the pace of random faults."""

from __future__ import annotations

from typing import Any

import pretrain_clm as recipe  # type: ignore[import-not-found]

from benchmarks.soak_pace import rest


class Trainer(recipe.Trainer):
    """Rests within the forward pass: not in steps that a newcomer's script only goes through."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine, steps = self.engine, self.args.train_iters
        engine.module.register_forward_pre_hook(lambda *_: rest(engine.global_steps, steps))


if __name__ == "__main__":
    recipe.Trainer = Trainer
    recipe.main()
