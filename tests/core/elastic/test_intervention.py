"""The learning rate while replica groups are away."""

from __future__ import annotations

import math

import pytest
import torch

from ft_core.elastic.rules import intervened


@pytest.mark.parametrize("factor", [1.0, 0.0, 0.5, math.sqrt(2 / 3)])
def test_only_the_step_sees_another_rate(factor: float):
    weights = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    rate = torch.tensor(0.3)  # as an optimizer that runs in a CUDA graph has it
    optimizer = torch.optim.SGD([{"params": weights[0], "lr": 0.1}, {"params": weights[1], "lr": rate}])
    schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9)
    for weight in weights:
        weight.grad = torch.ones(3)
    with intervened(optimizer.param_groups, factor):
        optimizer.step()
    assert weights[0].tolist() == pytest.approx([-0.1 * factor] * 3)
    assert weights[1].tolist() == pytest.approx([-0.3 * factor] * 3)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[1]["lr"] is rate
    schedule.step()
    assert schedule.get_last_lr()[0] == 0.1 * 0.9


def test_a_step_that_fails_leaves_the_rate_alone():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(RuntimeError), intervened(optimizer.param_groups, 0.5):
        raise RuntimeError
    assert optimizer.param_groups[0]["lr"] == 0.1
