"""A bit of a role's state flipped on purpose, as silent corruption would flip it (`--ft-inject`)."""

from __future__ import annotations

import torch

from ft_core.adapter import State, StateTensor
from ft_core.errors import ConfigError
from ft_core.state.snapshot import is_compared

MOMENTS = ("exp_avg", "momentum")
"""What the names of moments have in them."""


def flip(state: State, what: str) -> None:
    """Flip a bit of the largest number of one tensor that others hold alike. `what`: `weight`, of which the
    optimizer's own copy where it has one, or `moment`. Raises ConfigError where there is none."""
    found = [tensor for tensor in state.tensors() if is_compared(tensor)]
    moments = [tensor for tensor in found if any(name in tensor.name for name in MOMENTS)]
    weights = [tensor for tensor in found if not any(name in tensor.name for name in MOMENTS)]
    wanted = moments if what == "moment" else sorted(weights, key=_is_a_copy)
    if not wanted:
        raise ConfigError(f"--ft-inject: this role has no {what} that others hold as well")
    flat = wanted[0].tensor.detach().view(-1)
    at = int(flat.abs().argmax())
    number = flat[at : at + 1].view(torch.uint8)
    number[flat.element_size() - 2] ^= 0x10


def _is_a_copy(weight: StateTensor) -> bool:
    """Whether the optimizer may overwrite it with its own."""
    return not weight.name.endswith(".main") and not weight.name.startswith("master.")
