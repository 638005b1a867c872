"""DeepSpeed's CPU Adam holds state that no snapshot sees: the powers of its betas, in C++.

They are float products that grow by one factor a step, and are computed anew, by `pow` and so with other
last bits, whenever the step is not the one after the last. After a restore that would be the case.
Here the products are made again with the optimizer's own code, on a tensor of one element.
"""

from __future__ import annotations

from typing import Any

import torch

from ft_deepspeed import zero

_VANISHED = 2.0**-26
"""Below it a power no longer changes the bias correction, which is 1 minus it in float."""


class Powers:
    """Follows the CPU Adams of an engine, if it has any. Their betas are taken to be constant."""

    def __init__(self, engine: Any) -> None:
        inner = zero.inner_optimizers(engine)
        candidates = [*inner, *(vars(o).get("aux_optimizer") for o in inner)]  # Muon leaves some to Adam
        self._optimizers = [o for o in candidates if hasattr(o, "ds_opt_adam")]
        self._begun: list[int | None] = [None for _ in self._optimizers]
        self._seen = [0 for _ in self._optimizers]

    def state(self) -> list[tuple[int, int]]:
        """For each: the step after which its product began, and the newest one. To be asked every step."""
        for i, optimizer in enumerate(self._optimizers):
            step = _newest_step(optimizer)
            if self._begun[i] is None:
                self._begun[i] = step
            elif step not in (self._seen[i], self._seen[i] + 1):  # a checkpoint was loaded
                self._begun[i] = step - 1
            self._seen[i] = step
        return [(begun or 0, seen) for begun, seen in zip(self._begun, self._seen, strict=True)]

    def restore(self, state: list[tuple[int, int]]) -> None:
        """Make the products again. Takes a millisecond per thousand steps, until they have vanished."""
        for i, (begun, seen) in enumerate(state):
            self._begun[i], self._seen[i] = begun, seen
            _multiply(self._optimizers[i], begun, seen)


def _newest_step(optimizer: Any) -> int:
    return max((state.get("step", 0) for state in optimizer.state.values()), default=0)


def _multiply(optimizer: Any, begun: int, seen: int) -> None:
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    optimizer.ds_opt_adam.create_adam(
        optimizer.opt_id,
        group["lr"],
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        optimizer.adam_w_mode,
        False,
    )
    if max(beta1, beta2) ** seen < _VANISHED:
        begun = max(begun, seen - 1)
    scratch = [torch.zeros(1) for _ in range(4)]
    # Up to 0.17 a second tensor in the same step made it compute the powers anew.
    tensors = min(2, len(optimizer.state))
    for step in range(begun + 1, seen + 1):
        for _ in range(tensors):
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id,
                step,
                0.0,
                beta1,
                beta2,
                group["eps"],
                0.0,
                group["bias_correction"],
                *scratch,
            )
