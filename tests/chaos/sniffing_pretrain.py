"""`recipes/megatron/pretrain_gpt.py` with what Megatron's looks at the devices need, where there are none."""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401

# isort: on
from typing import Any

import pretrain_gpt as recipe
import torch
from megatron.core.utils import StragglerDetector
from megatron.training import training


def forward_step(*args: Any) -> Any:
    """As the recipe's, timed."""
    with DETECTOR:
        return forward(*args)


def main() -> None:
    """As the recipe's."""
    recipe.forward_step = forward_step
    training._run_gpu_sniff_test = lambda tag: torch.rand(3)  # as the products that it tries are drawn
    for name in ("temperature", "power_draw", "utilization", "clock_rate"):
        setattr(torch.cuda, name, lambda: 0)
    recipe.main()


DETECTOR = StragglerDetector()
forward = recipe.forward_step
if __name__ == "__main__":
    main()
