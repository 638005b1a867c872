"""Stage 3's small parameters, which stay whole on every rank once a pass or a step has gathered them.

Whether they are decides what is communicated next. So it is a part of where a script is, as its random states
are: `deepspeed.zero.GatheredParameters` leaves them in parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


def parameters(engine: Any) -> list[Any]:
    """The persistent parameters of this engine; none in other stages."""
    if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return []
    return list(engine.optimizer.persistent_parameters)


def are_whole(engine: Any) -> bool:
    """Whether there are any, and all of them are."""
    found = parameters(engine)
    return bool(found) and all(p.ds_status == ZeroParamStatus.AVAILABLE for p in found)


def release(found: Iterable[Any]) -> None:
    """None of these is whole any more, so whoever needs one fetches it."""
    for parameter in found:
        if parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE or parameter.data.numel():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def fill(engine: Any, whole: Iterable[torch.Tensor] = ()) -> None:
    """Have them whole: with these values, or with none."""
    values = iter(whole)
    for parameter in parameters(engine):
        shape = parameter.ds_shape
        value = next(values, None)
        if value is None and parameter.ds_status == ZeroParamStatus.AVAILABLE:
            continue
        parameter.data = (
            torch.zeros(shape, dtype=parameter.dtype, device=parameter.device) if value is None else value
        )
        parameter.ds_status = ZeroParamStatus.AVAILABLE
