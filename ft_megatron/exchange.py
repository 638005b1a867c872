"""Megatron's gradient exchange while replica groups come and go (see `Membership.gradient_scale`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ft_core.worker.session import Session
from ft_megatron import patched


class Exchange:
    """Sets what Megatron's gradient buckets are multiplied by before they are reduced."""

    def __init__(self, model: list[Any], session: Session, group: int) -> None:
        """`model`: the DDP-wrapped chunks; `group`: this role's replica group."""
        self._session, self._group = session, group
        self._interleaved = len(model) > 1
        self._averaged = model[0].ddp_config.average_in_collective
        self._per_token = bool(getattr(model[0].config, "calculate_per_token_loss", False))
        for chunk in model:
            for bucket_group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                factors = [bucket.gradient_scaling_factor for bucket in bucket_group.buckets]
                scaled = partial(self._scaled, bucket_group=bucket_group, factors=factors)
                patched.GRADIENTS.wrap(scaled, of=bucket_group)

    def _scaled(self, start: Callable[..., Any], *, bucket_group: Any, factors: list[float]) -> Any:
        def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
            session = self._session
            scale = session.groups.membership.gradient_scale
            counted = len(session.groups.taking_part) if self._averaged else None
            for bucket, factor in zip(bucket_group.buckets, factors, strict=True):
                scaled = scale(session.version + 1, self._group, factor, counted)
                if scaled is None:
                    bucket.grad_data.zero_()
                else:
                    bucket.gradient_scaling_factor = factor if self._per_token else scaled
            return start(*args, **kwargs)

        return start_grad_sync

    def schedule(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward_backward_func` of a training step, in which a group without samples does what it must.

        Its gradient is zero whatever it computes, so one backward pass is enough, which issues the same
        collectives as the others' last. It does all forward passes: they may draw random numbers, count what
        experts get, or have collectives of their own. So a group that has come back is at the exchange
        before the others, and the time it took to load its state is hidden (FT-HSDP, section 4.3).
        Interleaved schedules want whole rounds of micro batches, and are left as they are.
        """
        if self._interleaved:
            return forward_backward

        def forward_backward_func(*, num_microbatches: int, **arguments: Any) -> Any:
            if num_microbatches > 1 and self._group not in self._session.groups.contributing:
                forward_backward(**{**arguments, "forward_only": True}, num_microbatches=num_microbatches - 1)
                num_microbatches = 1
            return forward_backward(num_microbatches=num_microbatches, **arguments)

        return forward_backward_func
