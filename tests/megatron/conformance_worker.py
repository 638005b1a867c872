"""Run by torchrun for test_conformance.py: Megatron's adapter, with the models and steps of the recipe."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cases import run_each

from ft_core.conformance import Collectives, check
from ft_core.worker import session

collectives = Collectives()  # before Megatron takes references

import ft_megatron.cpu_shadow_auto  # noqa: E402, F401, I001
import pretrain_gpt_core as recipe  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from ft_megatron.state import MegatronAdapter  # noqa: E402

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 4 --mock-data --train-iters 6"
).split()
SHARDED = "--use-distributed-optimizer"
CASES = {
    "plain-fp32": "",
    "plain-fp16": "--fp16 --initial-loss-scale 4194304 --loss-scale-window 2",
    "sharded-fp32": SHARDED,
    "sharded-bf16-lean": f"{SHARDED} --bf16",
    "sharded-bf16-overlapped": f"{SHARDED} --bf16 --overlap-grad-reduce",
    "sharded-gathered-late": f"{SHARDED} --overlap-grad-reduce --overlap-param-gather",
    "sharded-instances": f"{SHARDED} --bf16 --num-distributed-optimizer-instances 2",
    "tp2-bf16": "--bf16 --tensor-model-parallel-size 2",
    "pp2-fp16-sharded": f"{SHARDED} --fp16 --initial-loss-scale 65536 --pipeline-model-parallel-size 2",
}


class Adapter(MegatronAdapter):
    """Knows when the loop is entered again, which is when the state was made whole."""

    entered = True

    def derive(self) -> None:
        super().derive()
        self.entered = True


class Training:
    """The recipe's, step by step."""

    def __init__(self, args: recipe.Arguments, seed: int, lean: bool) -> None:
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.trainer = recipe.Trainer(args)
        session._current = SimpleNamespace(lean=lean)  # type: ignore[assignment]
        try:
            self.adapter = Adapter(self.trainer.model, self.trainer.optimizer, self.trainer.scheduler)
        finally:
            session._current = None

    def step(self, version: int) -> Any:
        if self.adapter.entered and self.trainer.gathers_in_forward:
            self.trainer.model[0].disable_forward_pre_hook(param_sync=False)
        self.adapter.entered = False
        return self.trainer.train_step(version)

    def weights(self) -> dict[str, torch.Tensor]:
        """What lies there may be torn where the next forward pass gathers it."""
        if self.trainer.gathers_in_forward:
            return {}
        return {n: p.data for n, p in self.trainer.model[0].named_parameters()}


def run(case: str) -> int:
    parallel_state.destroy_model_parallel()
    args = recipe.parse_args([*TINY, *CASES[case].split()])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )
    args.set_data_parallel_size(parallel_state.get_data_parallel_world_size())
    every = 7 if args.tensor_model_parallel_size > 1 else 2  # there are many, of the same kind
    return check(lambda seed: Training(args, seed, case.endswith("lean")), collectives, every)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    run_each(run)
