"""Lets Megatron's distributed optimizer load its checkpoints without apex and transformer-engine.

With those, Adam's step is one number per parameter group. torch's Adam keeps a tensor per parameter, and
Megatron's code for it (0.16 to 0.19) cannot resume from a checkpoint of its own. It asks an optimizer that
has not stepped yet for the step, and fails; it gives all parameters one tensor, which each of them
increments; and it writes the step that the optimizer had before over the one that it has loaded. The losses
then differ from the second step on. Hosts without a GPU have only torch's Adam, so `cpu_shadow.install`
calls this.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from ft_core.import_hook import after_import


def install() -> None:
    """Mend the distributed optimizer, now or as soon as it is imported."""
    after_import("megatron.core.optimizer.distrib_optimizer", _mend)


def _mend(module: ModuleType) -> None:
    if module.HAVE_APEX_OR_TE:
        return
    optimizer = module.DistributedOptimizer
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(state_dict)
    def with_state(self: Any) -> Any:
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not self.optimizer.state:
            _start(self.optimizer)
        return state_dict(self)

    @functools.wraps(load_state_dict)
    @torch.no_grad()  # in fp32 its shards are views of the parameters, which autograd guards
    def with_own_steps(self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        step = loaded["optimizer"]["param_groups"][0]["step"]
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(step), dtype=torch.float32)

    optimizer.state_dict, optimizer.load_state_dict = with_state, with_own_steps


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter the state that Adam gives it in the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
