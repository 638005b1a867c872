"""Run by torchrun for test_adoption.py: a rank holds, beside its own state, what another rank has alone.

That rank is there, too, so that both can be compared after every step; only the norm counts it twice, on all
ranks alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from state_worker import ACCUMULATED, BF16, CASES, DYNAMIC, TrainedEngine, collectives, main, stage

from ft_core.adapter import Redundancy
from ft_core.conformance import Trial
from ft_core.state import envelope

FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES |= {
    "stage1-fp16-fp32-gradients-accumulated": DYNAMIC | stage(1) | ACCUMULATED | FP32,
    "stage2-bf16-fp32-gradients-accumulated": BF16 | stage(2) | ACCUMULATED | FP32,
    "stage2-bf16-fp32-gradients-reduced-whole": BF16 | stage(2, reduce_scatter=False) | ACCUMULATED | FP32,
    "stage2-reduced-whole": stage(2, reduce_scatter=False) | ACCUMULATED,
}
FIRST, STEPS = 2, 4
KEYS = (None, "exp_avg")


def alone(state: Any, role: int) -> tuple[list[tuple[str, Any, bool]], dict[str, torch.Tensor], Any]:
    """What only `role` has: names and shapes, contents, and the envelope's part that is the shard's own."""
    found = [t for t in state.tensors() if t.holders == (role,) and not t.volatile]
    about = [(t.name, t.tensor.shape, t.volatile) for t in found]
    of_all = envelope.decode(envelope.encode(state.envelope()))
    return about, {t.name: t.tensor.detach().clone() for t in found}, of_all


def compare(found: Any, expected: Any, where: str) -> None:
    assert found[0] == expected[0], f"{where}: {found[0]} is not {expected[0]}"
    for name, tensor in found[1].items():
        assert torch.equal(tensor, expected[1][name]), f"{where}: {name} differs"
    for key in ("scalars", "on_host", "groups"):
        assert repr(found[2][key]) == repr(expected[2][key]), f"{where}: {key} differs"


def linked(job: TrainedEngine) -> list[Any]:
    """Parameters that the optimizer trains."""
    return [p for p in job.engine.module.parameters() if getattr(p, "_hp_mapping", 0) != 0]


def gathered(job: TrainedEngine) -> list[dict[str | None, torch.Tensor]]:
    """By parameter what scripts are given of the main parameter and of Adam's momentum."""
    return [
        {None: safe_get_full_fp32_param(p), "exp_avg": safe_get_full_optimizer_state(p, "exp_avg")}
        for p in linked(job)
    ]


def fragment(parameter: Any, key: str | None) -> torch.Tensor:
    """This rank's part of the same, and zeros."""
    whole = torch.zeros(parameter.numel())
    if (mapping := parameter._hp_mapping) is not None:
        at = mapping.lp_fragment_address
        whole.narrow(0, at.start, at.numel).copy_(mapping.get_hp_fragment(key).detach())
    return whole


def check(case: str) -> int:
    """Returns how many tensors were compared."""
    job = TrainedEngine(case, seed=1)
    ring, rank = job.adapter.ring, dist.get_rank()
    *_, adopter, role = ring
    assert job.adapter.replica_group.redundancy is Redundancy.ADOPTABLE, job.adapter.objection
    Trial(job, collectives).train(0, FIRST)

    def of_role() -> Any:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, alone(job.adapter, rank))
        return everybody[role]

    there, adopted, compared = of_role(), None, 0
    if rank == adopter:
        adopted = job.adapter.adopt([role])[role]
        adopted.restore(there[1], there[2])
    for step in range(FIRST + 1, FIRST + STEPS):
        job.step(step - 1)
        there = of_role()
        if adopted is not None:
            compare(alone(adopted, role), there, f"{case}, step {step}")
            compared += len(there[1])
    for parameter in linked(job):
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) + 1)
    there = of_role()
    if adopted is not None:
        compare(alone(adopted, role), there, f"{case}, set by parameter")
    twice = gathered(job)
    if adopted is not None:
        assert adopted is job.adapter.adopt([role])[role]
        assert not job.adapter.adopt([])
    for parameter, both, one in zip(linked(job), twice, gathered(job), strict=True):
        for key in KEYS:
            part = fragment(parameter, key)
            dist.broadcast(part, role, group=parameter._dp_group)
            assert torch.equal(both[key], one[key] + part.view_as(one[key])), f"{case}: {key} by parameter"
    job.step(FIRST + STEPS - 1)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [p.detach() for p in job.engine.module.parameters()])
    for mine, other in zip(everybody[rank], everybody[role], strict=True):
        assert torch.equal(mine, other), f"{case}: weights of ranks {rank} and {role} differ in the end"
    return compared if rank == adopter else 1


if __name__ == "__main__":
    main(check)
