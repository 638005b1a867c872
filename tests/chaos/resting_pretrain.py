"""`recipes/megatron/pretrain_gpt.py` with a rest in each step."""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401

# isort: on
import functools
from typing import Any

import pretrain_gpt as recipe
from megatron.training import get_args, training
from resting import rest


def resting(train_step: Any) -> Any:
    """`train_step`, after a rest."""

    @functools.wraps(train_step)
    def rested(*args: Any, **kwargs: Any) -> Any:
        rest(get_args().curr_iteration + 1, get_args().train_iters)
        return train_step(*args, **kwargs)

    return rested


if __name__ == "__main__":
    training.train_step = resting(training.train_step)
    recipe.main()
