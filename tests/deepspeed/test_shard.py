"""What an optimizer steps, by itself: `ft_deepspeed.shard`."""

from __future__ import annotations

import pytest
import torch

from ft_core.errors import ConfigError
from ft_deepspeed.parts import master_name
from ft_deepspeed.shard import Shard
from ft_deepspeed.zero import Master


def after_a_step(layers: int, width: int = 4, listed: bool = True) -> Shard:
    parameters = [torch.nn.Parameter(torch.ones(width)) for _ in range(layers)]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(width)
    optimizer.step()
    masters = [Master(master_name(0, i), p, (0,), listed) for i, p in enumerate(parameters)]
    return Shard(masters, lambda: [optimizer])


@pytest.mark.parametrize(
    ("saved", "fits"),
    [
        (after_a_step(2), True),
        (after_a_step(2, listed=False), True),
        (after_a_step(3), False),
        (after_a_step(3, listed=False), False),
        (after_a_step(2, width=1), False),
    ],
    ids=["same", "full", "longer", "longer-full", "narrower"],
)
def test_what_another_model_has_saved_is_refused(saved: Shard, fits: bool) -> None:
    """Some of it would fit: a parameter of one element goes into any, and what is too much goes nowhere."""
    shard, tensors = after_a_step(2), {t.name: t.tensor for t in saved.tensors()}
    if fits:
        shard.check(tensors)
    else:
        with pytest.raises(ConfigError, match="another model"):
            shard.check(tensors)
