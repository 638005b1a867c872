"""The engine's part in a train step: commit wait, barrier and step tag, put into Megatron's own calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ft_core.elastic.rules import intervened
from ft_core.worker.session import Session
from ft_megatron import patched

log = logging.getLogger(__name__)
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
    extra = not has_norm or (not spans_all and overlapped)
    if extra:
        log.warning(
            "this configuration has no reduction that all ranks take part in: one of one element is added"
        )

    def protected(step: Callable[..., Any]) -> Callable[..., Any]:
        def protected_step(*args: Any, **kwargs: Any) -> Any:
            session.point("gradients")
            if spans_all or extra:
                session.commit_wait()
            if extra:
                dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()))
            return step(*args, **kwargs)

        return protected_step

    def tagged(step_with_ready_grads: Callable[..., Any]) -> Callable[..., Any]:
        def tagged_step_with_ready_grads(*args: Any, **kwargs: Any) -> Any:
            session.optimizer_begins()
            with intervened(optimizer.param_groups, session.lr_factor):
                return step_with_ready_grads(*args, **kwargs)

        return tagged_step_with_ready_grads

    patched.STEP.wrap(protected, of=optimizer)
    patched.STEP_WITH_READY_GRADS.wrap(tagged, of=optimizer)
    for chunk in model if session.injecting else ():
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            patched.GATHER.wrap(partial(_with_point, session=session), of=group)

    def protected_finalize(finalize: Finalize) -> Finalize:
        if spans_all or extra:
            return finalize

        def waiting(*args: Any, **kwargs: Any) -> Any:
            session.commit_wait()
            return finalize(*args, **kwargs)

        return waiting

    return protected_finalize


def _with_point(gather: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        session.point("gather")
        return gather(*args, **kwargs)

    return wrapped
