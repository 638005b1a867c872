"""What DeepSpeed's Adam on CPUs keeps in C++ is made again: steps go on as those of an undisturbed one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from ft_deepspeed.cpu_adam import CPUAdams, Powers, Products

BETAS = (0.9, 0.999)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([5], Products(5, 5, BETAS)),
        ([1, 2, 3], Products(1, 3, BETAS)),
        ([1, 1, 2, 2], Products(1, 2, BETAS, again=True)),
        ([1, 2, 7, 8], Products(7, 8, BETAS)),  # a checkpoint was loaded
        ([8, 3], Products(3, 3, BETAS)),  # a step was given up
    ],
)
def test_products_begin_anew_where_a_step_is_not_the_next(calls: list[int], expected: Products) -> None:
    products = Products(calls[0], calls[0], BETAS)
    for step in calls[1:]:
        products = products.after(step, BETAS)
    assert products == expected


def test_products_begin_anew_with_other_betas() -> None:
    assert Products(1, 4, BETAS).after(5, (0.8, 0.999)) == Products(5, 5, (0.8, 0.999))


def test_betas_are_compared_as_in_cpp() -> None:
    calls: list[tuple[int, tuple[float, float]]] = []
    powers = Powers(lambda step, betas: calls.append((step, betas)))
    powers.note(4, (0.9, 0.999))
    powers.note(torch.tensor(5.0), (0.9 + 1e-10, 0.999))  # another double, the same float
    assert powers.products is not None and (powers.products.begun, powers.products.seen) == (4, 5)
    powers.restore(powers.products)
    assert not calls  # nothing has changed
    powers.note(6, BETAS)
    powers.restore(Products(4, 5, powers.products.betas))
    assert [step for step, _ in calls] == [4, 4, 5] and calls[0][1] != calls[1][1] == calls[2][1]


def _engine(optimizer: Any) -> Any:
    return SimpleNamespace(optimizer=optimizer, module=torch.nn.Module())


def _steps(optimizer: Any, parameters: list[Any], first: int, last: int, cycled: bool) -> None:
    for step in range(first, last):
        draws = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        for group in optimizer.param_groups:
            group["betas"] = (0.9 - step // 6 % 2 * 0.05 * cycled, 0.999)
        optimizer.step()


@pytest.mark.parametrize("cycled", [False, True], ids=["constant", "cycled"])
@pytest.mark.parametrize("tensors", [1, 3])
@pytest.mark.parametrize("make", [DeepSpeedCPUAdam, pytest.param(FusedAdam, marks=pytest.mark.long)])
def test_steps_after_a_restore_are_those_of_an_undisturbed_optimizer(
    make: Callable[..., Any], tensors: int, cycled: bool
) -> None:
    def begun() -> tuple[Any, list[Any], CPUAdams]:
        torch.manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(50)) for _ in range(tensors)]
        optimizer = make(parameters, lr=0.1)
        return optimizer, parameters, CPUAdams(_engine(optimizer))

    optimizer, parameters, adams = begun()
    _steps(optimizer, parameters, 0, 20, cycled)
    powers, state = adams.state(), copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in parameters]
    _steps(optimizer, parameters, 20, 40, cycled)

    def gone_on(restored: bool) -> list[torch.Tensor]:
        optimizer, parameters, adams = begun()
        _steps(optimizer, parameters, 0, 1, cycled)  # a newcomer's, or a step that is given up
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        optimizer.load_state_dict(copy.deepcopy(state))
        if restored:
            adams.restore(powers)
        _steps(optimizer, parameters, 20, 40, cycled)
        return [p.detach() for p in parameters]

    assert all(map(torch.equal, gone_on(restored=True), parameters))
    if not cycled:  # their bits depend on it
        assert not all(map(torch.equal, gone_on(restored=False), parameters))
