"""What optimizers keep, put back as a version has it: whatever optimizer it is, and whatever it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def restore_state(
    state: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    place: Callable[[str, torch.Tensor], torch.device],
) -> bool:
    """Have what an optimizer keeps for one parameter, `state`, as it was: `tensors` and the rest by key.

    `place`: where a tensor belongs that is not there yet. Returns whether any were made or dropped, and not
    only written.
    """
    remade = False
    for key in state.keys() - tensors.keys() - scalars.keys():  # what came with a later step
        del state[key]
        remade = True
    for key, saved in tensors.items():
        live = state.get(key)
        if not isinstance(live, torch.Tensor) or live.shape != saved.shape or live.dtype != saved.dtype:
            state[key] = live = torch.empty(saved.shape, dtype=saved.dtype, device=place(key, saved))
            remade = True
        live.copy_(saved)
    state.update(copy.deepcopy(dict(scalars)))
    return remade


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """All that a parameter group has but its parameters, as far as it is plain data."""
    return {key: value for key, value in group.items() if key != "params" and is_plain(value)}


def restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put back what `hyper_parameters` returned, here or in another process. Nothing of it is kept."""
    for key in hyper_parameters(group).keys() - saved.keys():  # what came with a later step
        del group[key]
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = copy.deepcopy(value)


def is_plain(value: Any) -> bool:
    """Whether it can go into an envelope: numbers, texts, tensors, and containers of these."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, np.generic, torch.Tensor))
