"""The state of a learning-rate schedule of the script's own, with whatever is in it.

A `state_dict` may have other schedules in it, objects, sets, functions and devices. What can change is taken
as plain data; what cannot stays what a process has.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import torch

_OBJECT, _SET, _TUPLE, _LIVE = "ft/object", "ft/set", "ft/tuple", "ft/live"
_DEEPEST = 6
_NEVER = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.nn.Module,
    torch.optim.Optimizer,
)
"""What is not a part of a schedule, though it may hold one."""


def capture(schedule: Any) -> Any:
    """Its state, as plain data; None where it has none."""
    return _taken(schedule.state_dict(), 0) if hasattr(schedule, "state_dict") else None


def restore(schedule: Any, state: Any) -> None:
    """Put back what `capture` returned, in the same process or in another one."""
    schedule.load_state_dict(_given(state, schedule.state_dict()))


def _taken(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, np.generic, torch.Tensor)):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        return {key: _taken(part, depth) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return {_SET: [_taken(part, depth) for part in sorted(value, key=repr)]}
    if isinstance(value, tuple):
        return {_TUPLE: [_taken(part, depth) for part in value]}
    if isinstance(value, list):
        return [_taken(part, depth) for part in value]
    if depth < _DEEPEST and not isinstance(value, _NEVER):
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return {_OBJECT: _taken(value.state_dict(), depth + 1)}
        if hasattr(value, "__dict__"):
            return {_OBJECT: _taken(vars(value), depth + 1)}
    return {_LIVE: True}


def _given(state: Any, live: Any) -> Any:
    if isinstance(state, list):
        parts = live if isinstance(live, list) else []
        return [_given(part, parts[at] if at < len(parts) else None) for at, part in enumerate(state)]
    if not isinstance(state, dict):
        return copy.deepcopy(state)
    if _LIVE in state:
        return live
    if _SET in state:
        return set(_given(state[_SET], []))
    if _TUPLE in state:
        return tuple(_given(state[_TUPLE], list(live) if isinstance(live, tuple) else []))
    if _OBJECT in state:
        if hasattr(live, "load_state_dict"):
            restore(live, state[_OBJECT])
        elif hasattr(live, "__dict__"):
            vars(live).update(_given(state[_OBJECT], vars(live)))
        return live
    known = live if isinstance(live, dict) else {}
    return {key: _given(part, known.get(key)) for key, part in state.items()}
