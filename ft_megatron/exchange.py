"""The gradient exchange while replica groups come and go (FT-HSDP, sections 4.2 and 4.3).

Gradients are averaged over the groups that have trained samples in the step. A group that has come back and
has not been dealt any takes part with a zero gradient, which brings it to the same state as all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ft_core.session import Session


class Exchange:
    """Sets what Megatron's gradient buckets are multiplied by before they are reduced."""

    def __init__(self, model: list[Any], session: Session, group: int) -> None:
        """`model`: the DDP-wrapped chunks; `group`: this role's replica group."""
        self._session, self._group = session, group
        self._averaged = model[0].ddp_config.average_in_collective
        self._per_token = bool(getattr(model[0].config, "calculate_per_token_loss", False))
        for chunk in model:
            for bucket_group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                factors = [bucket.gradient_scaling_factor for bucket in bucket_group.buckets]
                sync = self._scaled(bucket_group, bucket_group.start_grad_sync, factors)
                bucket_group.start_grad_sync = sync

    def _scaled(self, bucket_group: Any, start: Callable[..., Any], factors: list[float]) -> Any:
        def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
            session = self._session
            contributors = session.contributing
            counted = len(session.taking_part) if self._averaged else session.membership.groups
            for bucket, factor in zip(bucket_group.buckets, factors, strict=True):
                if self._group not in contributors:
                    bucket.grad_data.zero_()
                elif not self._per_token and counted != len(contributors):
                    bucket.gradient_scaling_factor = factor * counted / len(contributors)
                else:
                    bucket.gradient_scaling_factor = factor
            return start(*args, **kwargs)

        return start_grad_sync
