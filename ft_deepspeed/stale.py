"""Whether DeepSpeed's stage 3 trains on gradients of earlier steps, which a failure loses.

Its buffer of gradients is overwritten by the first micro batch of a step, parameter by parameter. One that
gets no gradient there keeps what an earlier step has left, and that is stepped with, or added to. It is no
part of a snapshot: after a failure it is zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ft_deepspeed import patched

log = logging.getLogger(__name__)


class StaleGradients:
    """Says so once, when a step of an engine has ended in which there were such."""

    def __init__(self, engine: Any, role: int) -> None:
        self._engine, self._role = engine, role
        self._given: set[int] = set()
        """Which parameters got a gradient in the first micro batch of this step."""
        self._parts: dict[int, Any] = {}
        """All whose gradients this rank has a part of."""
        if isinstance(optimizer := engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            found = (p for group in optimizer.fp16_groups for p in group)
            self._parts = {p.ds_id: p for p in found if _has_part(p)}
            patched.GIVEN_GRADIENTS.wrap(self._noting, of=optimizer)

    def _noting(self, partition: Callable[..., Any]) -> Callable[..., Any]:
        def noting(parameters: list[Any], *args: Any, **kwargs: Any) -> Any:
            if self._parts and self._engine.optimizer.micro_step_id == 0:
                self._given.update(p.ds_id for p in parameters)
            return partition(parameters, *args, **kwargs)

        return noting

    def step_ended(self, step: int) -> None:
        """Step number `step` is done."""
        given, self._given = self._given, set()
        if given.issuperset(self._parts):
            return
        rest = {at for at, p in self._parts.items() if p.requires_grad and at not in given}
        if not rest or not given:  # a step that was loaded
            return
        names = [name for name, p in self._engine.module.named_parameters() if p.ds_id in rest]
        log.warning(
            "role %d: step %d: parameters that got no gradient in its first micro batch: %d (%s); stage 3 "
            "goes by what an earlier step has left of theirs, which a failure loses: losses after one differ "
            "from those without. Let each take part in every micro batch (add 0 times its sum to the loss)",
            *(self._role, step, len(rest), ", ".join(names[:3]) + ", ..." * (len(names) > 3)),
        )
        self._parts = {}


def _has_part(parameter: Any) -> bool:
    return parameter.partition_numel() * dist.get_rank(parameter.ds_process_group) < parameter.ds_numel
