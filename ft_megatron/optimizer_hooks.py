"""The engine's part in a train step: commit wait, barrier and step tag, put into Megatron's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ft_core.worker.boundary import Boundary, intervening, preceded_by
from ft_core.worker.session import Session
from ft_megatron import patched

Finalize = Callable[..., Any]


def hook_optimizer(
    optimizer: Any, model: list[Any], session: Session, sharded: bool
) -> Callable[[Finalize], Finalize]:
    """Put the commit wait, the barrier and the step tag around the optimizer's own methods.

    The barrier is the all-reduce of the gradient norm, which `ChainedOptimizer.step` always does. With
    one distributed optimizer it spans every rank, so waiting for the commit just before it is enough.
    Otherwise it spans the model-parallel ranks only and becomes a barrier of all ranks together with
    the gradient exchange over DP before it: then the wait must come before that exchange.

    Returns what the caller applies to `finalize_model_grads`, wherever its training loop takes that from:
    the function with the wait before it, or the function itself where the wait stands elsewhere.
    """
    spans_all = sharded and model[0].ddp_config.num_distributed_optimizer_instances == 1
    has_norm = hasattr(optimizer, "chained_optimizers") or optimizer.config.clip_grad > 0
    overlapped = model[0].ddp_config.overlap_grad_reduce
    boundary = Boundary(session, not has_norm or (not spans_all and overlapped), torch.cuda.current_device)
    waits_at_step = spans_all or boundary.own_barrier

    def before_step() -> None:
        session.point("gradients")
        if waits_at_step:
            boundary.wait()

    patched.STEP.wrap(preceded_by(before_step), of=optimizer)
    slowed = intervening(session, lambda: optimizer.param_groups)
    patched.STEP_WITH_READY_GRADS.wrap(slowed, of=optimizer)
    patched.STEP_WITH_READY_GRADS.wrap(preceded_by(session.optimizer_begins), of=optimizer)
    for chunk in model if session.injecting else ():
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            patched.GATHER.wrap(preceded_by(lambda: session.point("gather")), of=group)

    return (lambda finalize: finalize) if waits_at_step else preceded_by(boundary.wait)
