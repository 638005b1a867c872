"""The DeepSpeed recipe with a rest in each step."""

from __future__ import annotations

from typing import Any

import pretrain_clm as recipe
from resting import rest


class Trainer(recipe.Trainer):
    """Rests within the forward pass: not in steps that a newcomer's script only goes through."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine, steps = self.engine, self.args.train_iters
        engine.module.register_forward_pre_hook(lambda *_: rest(engine.global_steps + 1, steps))


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()
