"""What optimizers keep, put back as it was before later steps."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ft_core.state.optimizer import hyper_parameters, restore_group, restore_state

HOST = torch.device("cpu")


def nowhere(key: str, tensor: torch.Tensor) -> torch.device:
    raise AssertionError(f"{key} is there")


def test_what_came_with_a_later_step_is_dropped_number_or_tensor() -> None:
    """An optimizer that finds a step count takes its moments for made."""
    state: dict[str, Any] = {"step": 3, "moment": torch.ones(2)}
    assert restore_state(state, {}, {}, nowhere)
    assert not state


def test_tensors_are_written_where_they_are_and_made_where_they_are_not() -> None:
    moment, wanted = torch.ones(2), torch.tensor([1.5, 2.5])
    state: dict[str, Any] = {"moment": moment, "count": 7, "window": torch.zeros(2)}
    saved = {"moment": wanted, "window": torch.ones(3), "late": torch.tensor(4)}
    asked = []

    def place(key: str, tensor: torch.Tensor) -> torch.device:
        asked.append(key)
        return HOST

    assert restore_state(state, saved, {"count": 2, "seen": [1]}, place)
    assert state["moment"] is moment and torch.equal(moment, wanted)
    assert asked == ["window", "late"] and torch.equal(state["window"], torch.ones(3))
    assert (state["count"], state["seen"]) == (2, [1])
    assert not restore_state(
        state, {k: v.clone() for k, v in saved.items()}, {"count": 2, "seen": [1]}, nowhere
    )


def test_nothing_of_a_version_is_kept() -> None:
    scalars = {"history": [1.0]}
    tensors = {"moment": torch.zeros(1)}
    state: dict[str, Any] = {}
    restore_state(state, tensors, scalars, lambda *_: HOST)
    state["history"].append(2.0)
    state["moment"].add_(1)
    assert scalars == {"history": [1.0]} and tensors["moment"].item() == 0


def test_hyper_parameters() -> None:
    rate, weight = torch.tensor(0.5), torch.nn.Parameter(torch.zeros(1))

    def decay(step: int) -> float:
        return 0.0

    group: dict[str, Any] = {"params": [weight], "lr": rate, "betas": [0.9, 0.99], "decay": decay}
    saved = copy.deepcopy(hyper_parameters(group))
    assert saved.keys() == {"lr", "betas"}
    rate.add_(1)
    group["betas"][0] = 0.0
    group["step"] = 1
    restore_group(group, saved)
    assert group["lr"] is rate and rate.item() == 0.5, "who captured a graph has this tensor"
    assert group.keys() == {"params", "lr", "betas", "decay"} and group["decay"] is decay
    group["betas"][0] = 0.1
    assert saved["betas"] == [0.9, 0.99]
