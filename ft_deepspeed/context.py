"""What a call of the engine depends on besides its arguments and the state that snapshots restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ft_core import rng

_BOUNDARY = "_is_gradient_accumulation_boundary"


@dataclass(frozen=True)
class Context:
    """Taken when the script makes a call; applied when the call is made again on its behalf.

    Random states and hyper-parameters are part of a snapshot, too, but the script may have changed them
    since: a loader that drew a seed, a learning rate set between two steps.
    """

    rng: dict[str, Any]
    hyper: list[dict[str, Any]]
    training: bool
    boundary: bool | None
    grad: bool
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def capture(cls, engine: Any) -> Context:
        """As it is now."""
        device = torch.device(engine.device).type
        return cls(
            rng=rng.capture(),
            hyper=[{k: v for k, v in group.items() if k != "params"} for group in param_groups(engine)],
            training=engine.module.training,
            boundary=getattr(engine, _BOUNDARY, None),
            grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        )

    def apply(self, engine: Any) -> None:
        """Set what is the process's and the engine's."""
        rng.restore(self.rng)
        for group, hyper in zip(param_groups(engine), self.hyper, strict=True):
            group.update(hyper)
        if engine.module.training != self.training:
            engine.module.train(self.training)
        if hasattr(engine, _BOUNDARY):
            setattr(engine, _BOUNDARY, self.boundary)

    @contextmanager
    def entered(self, engine: Any) -> Iterator[None]:
        """With torch's modes as they were around the call."""
        self.apply(engine)
        enabled, dtype = self.autocast
        device = torch.device(engine.device).type
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.grad),
            torch.autocast(device, dtype=dtype, enabled=enabled),
        ):
            yield


def param_groups(engine: Any) -> list[dict[str, Any]]:
    """Of the optimizer that takes the steps, below DeepSpeed's own."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return list(optimizer.param_groups) if optimizer is not None else []
