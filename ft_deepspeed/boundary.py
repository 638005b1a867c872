"""The commit wait and the barrier in DeepSpeed's step, and the places where a failure may be injected.

The rule (docs/recovery_rule.md): a rank waits for its commit before it contributes to a reduction without
which no rank can begin to change state. Which reduction that is depends on the optimizer:

- ZeRO 1, 2 and 3 reduce the overflow flag or the gradient norm over all data-parallel (and
  model-parallel) ranks at the beginning of `optimizer.step`: the wait is just before it.
- All others exchange gradients over the data-parallel ranks right before the step: the wait is before that
  exchange. With model or pipeline parallelism the norm, reduced over those ranks, ties the rest in.
- Where there is neither (no norm: fp32 without clipping), a reduction of one element over all ranks is added.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from ft_core.worker.session import Session

log = logging.getLogger(__name__)


def install(engine: Any, session: Session) -> None:
    """Put them around the methods of this engine and its optimizer."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", None)
    zero = isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3))
    if zero:
        extra = not (getattr(optimizer, "compute_grad_norm", True) or optimizer.check_grad_overflow)
    else:
        # In fp32 there is a norm if gradients are clipped, reduced over the model-parallel ranks.
        norm = inner is not None or (engine.gradient_clipping() > 0 and engine.mpu is not None)
        extra = not norm and engine.dp_world_size < dist.get_world_size()
    if extra:
        log.warning(
            "this configuration has no reduction that all ranks take part in: one of one element is added"
        )

    def wait() -> None:
        session.commit_wait()
        if extra:
            dist.all_reduce(torch.zeros(1, device=engine.device))

    def before_step() -> None:
        session.point("gradients")
        if zero:
            wait()

    def before_exchange() -> None:
        if not zero:
            wait()

    engine.buffered_allreduce_fallback = _preceded(engine.buffered_allreduce_fallback, before_exchange)
    step = _preceded(optimizer.step, before_step)
    bound = functools.wraps(step)(lambda _, *args, **kwargs: step(*args, **kwargs))
    optimizer.step = MethodType(bound, optimizer)  # torch's schedulers expect one
    stepping = optimizer if inner is None else inner
    stepping.register_step_pre_hook(lambda *_: session.optimizer_begins())
    stepping.register_step_post_hook(lambda *_: session.point("gather"))
    if session.injecting and hasattr(engine, "_INSTRUCTION_MAP"):  # elsewhere `calls.Backward` has the point
        from deepspeed.runtime.pipe.schedule import BackwardPass

        backward = _preceded(engine._INSTRUCTION_MAP[BackwardPass], lambda: session.point("backward"))
        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardPass: backward}


def _preceded(method: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    return wrapped
