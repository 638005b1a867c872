"""What a call of the engine depends on besides its arguments and the state that snapshots restore."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ft_core.state import rng
from ft_core.state.optimizer import hyper_parameters, restore_group
from ft_deepspeed import persistent
from ft_deepspeed.module_state import Modes, set_modes
from ft_deepspeed.zero import inner_optimizer

_FLAGS = ("_is_gradient_accumulation_boundary", "inside_no_sync_ctxt", "_manual_backward_expected")
"""What the script sets on the engine around its calls."""
_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
"""Kernels that `torch.nn.attention.sdpa_kernel` chooses from."""
_CONFIG = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""What a script may change of its configuration in training: how many samples make a step, and the like."""
_OPTIMIZER = ("clip_grad", "_coalesce_grad_reduction", "_is_gradient_accumulation_boundary")
"""The same in DeepSpeed's optimizers."""


@dataclass(frozen=True)
class Context:
    """Taken when the script makes a call; applied when the call is made again on its behalf.

    Random states and hyper-parameters are part of a snapshot, too, but the script may have changed them
    since: a loader that drew a seed, a learning rate set between two steps.
    """

    rng: dict[str, Any]
    hyper: list[dict[str, Any]]
    modes: Modes
    attention: dict[str, bool]
    settings: list[dict[str, Any]]
    """What the script sets, of each of `_owners`."""
    grad: bool
    autocast: tuple[bool, torch.dtype]
    whole: bool
    """Whether stage 3's small parameters are."""
    module: dict[str, Any]
    """What the model has in its attributes."""

    @classmethod
    def capture(cls, engine: Any) -> Context:
        """What a step may change beside parameters and optimizer state, as it is now."""
        device = torch.device(engine.device).type
        return cls(
            rng=rng.capture(),
            hyper=copy.deepcopy([hyper_parameters(g) for g in inner_optimizer(engine).param_groups]),
            modes=engine.ft_protection.module.modes(),
            attention=_attention(),
            settings=[{n: getattr(of, n) for n in names if hasattr(of, n)} for of, names in _owners(engine)],
            grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
            whole=persistent.are_whole(engine),
            module=engine.ft_protection.module.capture(),
        )

    def apply(self, engine: Any) -> None:
        """Set what is the process's and the engine's."""
        rng.restore(self.rng)
        engine.ft_protection.module.restore(self.module)
        for group, hyper in zip(inner_optimizer(engine).param_groups, self.hyper, strict=True):
            restore_group(group, hyper)
        set_modes(self.modes)
        _set_attention(self.attention)
        for (owner, _), values in zip(_owners(engine), self.settings, strict=True):
            for name, value in values.items():
                setattr(owner, name, value)
        if hasattr(engine, "micro_batches"):  # a pipeline's own name for it
            engine.micro_batches = engine.gradient_accumulation_steps()
        if not self.whole:
            persistent.release(persistent.parameters(engine))

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


def _owners(engine: Any) -> tuple[tuple[Any, tuple[str, ...]], ...]:
    return (engine, _FLAGS), (engine._config, _CONFIG), (engine.optimizer, _OPTIMIZER)


def _attention() -> dict[str, bool]:
    return {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in _ATTENTION}


def _set_attention(enabled: dict[str, bool]) -> None:
    for name, value in enabled.items() - _attention().items():
        getattr(torch.backends.cuda, f"enable_{name}")(value)
