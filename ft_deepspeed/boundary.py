"""The commit wait and the barrier in DeepSpeed's step, and the places where a failure may be injected.

Which reduction the commit wait must stand before (see `ft_core.worker.boundary`) depends on the optimizer:

- ZeRO 1, 2 and 3 reduce the overflow flag or the gradient norm over all data-parallel (and
  model-parallel) ranks at the beginning of `optimizer.step`: the wait is just before it.
- All others exchange gradients over the data-parallel ranks right before the step: the wait is before that
  exchange. With model or pipeline parallelism the norm, reduced over those ranks, ties the rest in.
- Where there is neither (no norm: fp32 without clipping), a reduction of one element over all ranks is added.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ft_core.worker.boundary import Boundary, preceded_by
from ft_core.worker.session import Session
from ft_deepspeed import patched


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
    boundary = Boundary(session, extra, lambda: engine.device)

    def before_step() -> None:
        session.point("gradients")
        if zero:
            boundary.wait()

    if not zero:
        patched.EXCHANGE_WHOLE.wrap(preceded_by(boundary.wait), of=engine)
    patched.STEP.wrap(preceded_by(before_step), of=optimizer, bound=True)  # schedulers expect a method
    stepping = optimizer if inner is None else inner
    stepping.register_step_pre_hook(lambda *_: session.optimizer_begins())
    stepping.register_step_post_hook(lambda *_: session.point("gather"))
    if session.injecting and hasattr(engine, "_INSTRUCTION_MAP"):  # elsewhere `calls.Backward` has the point
        from deepspeed.runtime.pipe.schedule import BackwardPass

        instructions = engine._INSTRUCTION_MAP
        backward = preceded_by(lambda: session.point("backward"))(instructions[BackwardPass])
        patched.INSTRUCTIONS.replace({**instructions, BackwardPass: backward}, of=engine)
