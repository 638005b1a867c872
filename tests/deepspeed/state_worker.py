"""Run by torchrun for test_state.py: train, interrupt each collective of a step in turn, restore, compare."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import run_each
from torch.utils.checkpoint import checkpoint

from ft_core.conformance import Collectives, Trial, check
from ft_core.state import envelope

TIMEOUT = timedelta(seconds=20)
collectives = Collectives()  # before DeepSpeed takes references


@functools.cache
def shared_group(new_group: Callable[..., Any], ranks: tuple[int, ...] | None) -> Any:
    """The newcomer's groups are those its peers have already, as they are under ft_core."""
    return new_group(ranks, timeout=TIMEOUT)


dist.new_group = functools.partial(
    lambda original, ranks=None, **_: shared_group(original, tuple(ranks) if ranks is not None else None),
    dist.new_group,
)

import deepspeed  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.zero import parameter_offload, partition_parameters  # noqa: E402

from ft_deepspeed.state import DeepSpeedAdapter  # noqa: E402
from ft_deepspeed.training import LoopState  # noqa: E402

WIDTH = 12


class Net(torch.nn.Module):
    """Dropout (RNG), a running mean (buffer), a frozen layer, and a weight used outside its own module."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.first = torch.nn.Linear(WIDTH, 20)
        self.frozen = torch.nn.Linear(20, 20).requires_grad_(False)
        self.drop = torch.nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(20))
        self.second = torch.nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def block(h: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.drop(torch.relu(self.first(h))))

        h = checkpoint(block, x.requires_grad_(), use_reentrant=True) if self.recomputed else block(x)
        if self.training:
            self.mean.lerp_(h.detach().mean(0).to(self.mean.dtype), 0.1)
        h = self.second(h - self.mean.to(h.dtype)) @ self.first.weight
        return torch.nn.functional.mse_loss(h.float(), y.float())


class Counting(Net):
    """Goes by what it has in attributes."""

    def __init__(self) -> None:
        super().__init__(recomputed=False)
        self.passes, self.highest = 0, torch.zeros(1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.highest = torch.maximum(self.highest, x.detach().float().max())
        return super().forward(x, y) * (self.highest / self.passes)


class Experts(torch.nn.Module):
    """A mixture of as many experts as there are ranks, spread over pairs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 20)
        expert = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.ReLU())
        self.moe = MoE(20, expert, num_experts=dist.get_world_size(), ep_size=2, min_capacity=0)
        self.second = torch.nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, loss, _ = self.moe(torch.relu(self.first(x)))
        return torch.nn.functional.mse_loss(self.second(h).float(), y.float()) + 0.1 * loss.float()


class Tied(torch.nn.Module):
    """One small weight used as it is, and in a layer that autocast computes in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tokens, targets = (t[:, :6].argmax(-1) for t in (x, y))
        h = self.embedding(tokens)
        return torch.nn.functional.cross_entropy(self.head(h).float(), targets) + h.square().mean()


class Layer(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.relu(super().forward(x)), 0.2, self.training)


BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1000000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
}
BF16 = {"bf16": {"enabled": True}}
DYNAMIC = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
ACCUMULATED = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}


def stage(number: int, **options: Any) -> dict[str, Any]:
    small = {
        "stage3_param_persistence_threshold": 25,
        "sub_group_size": 300,
        "stage3_prefetch_bucket_size": 300,
    }
    zero: dict[str, Any] = {"stage": number, "reduce_bucket_size": 300, "allgather_bucket_size": 500}
    return {"zero_optimization": zero | (small if number == 3 else {}) | options}


CASES: dict[str, dict[str, Any]] = {
    "stage0-fp32": {},
    "stage0-fp32-sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}},
    "stage0-fp16-static": STATIC,
    "stage0-fp16-dynamic": DYNAMIC,
    "stage0-fp16-fused": DYNAMIC | {"fused": True},
    "stage0-bf16": BF16,
    "stage0-autocast": AUTOCAST | ACCUMULATED,
    "stage1-bf16-fp32-gradients": BF16 | stage(1) | {"data_types": {"grad_accum_dtype": "fp32"}},
    "stage1-bf16-fp32-gradients-accumulated": BF16
    | stage(1)
    | ACCUMULATED
    | {"data_types": {"grad_accum_dtype": "fp32"}},
    "stage1-fp32": stage(1),
    "stage1-fp32-apart": stage(1) | {"apart": True},
    "stage2-fp16-dynamic-apart": DYNAMIC | stage(2) | {"apart": True},
    "stage1-fp32-full": stage(1) | {"full": True},
    "stage2-bf16-full": BF16 | stage(2) | {"full": True},
    "stage1-bf16": BF16 | stage(1) | {"data_types": {"grad_accum_dtype": "bf16"}},
    "stage1-fp32-accumulated": stage(1) | ACCUMULATED,
    "stage2-fp32": stage(2),
    "stage2-bf16-loop": BF16 | stage(2) | ACCUMULATED | {"loop": True},
    "stage2-autocast": AUTOCAST | stage(2),
    "stage2-gathered-buckets": stage(2, contiguous_gradients=False, reduce_scatter=False),
    "stage2-round-robin": BF16 | stage(2, round_robin_gradients=True),
    "stage2-bf16-accumulated": BF16 | stage(2) | ACCUMULATED,
    "stage2-fp16-dynamic": DYNAMIC | stage(2),
    "stage2-overlap": stage(2, overlap_comm=True) | ACCUMULATED,
    "stage2-timers": stage(2) | {"wall_clock_breakdown": True},
    "stage2-offload": BF16
    | stage(2, offload_optimizer={"device": "cpu"})
    | ACCUMULATED
    | {"zero_force_ds_cpu_optimizer": False},
    "stage2-offload-cpu-adam": BF16
    | stage(2, offload_optimizer={"device": "cpu"})
    | {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}},
    "stage3-offload-cpu-adam": BF16
    | stage(3, offload_optimizer={"device": "cpu"})
    | {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}},
    "stage3-fp32": stage(3),
    "stage3-bf16": BF16 | stage(3),
    "stage3-bf16-accumulated": BF16 | stage(3) | ACCUMULATED,
    "stage3-fp16-dynamic": DYNAMIC | stage(3),
    "stage3-recomputed": stage(3) | {"recomputed": True},
    "stage3-autocast-tied": stage(3)
    | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "tied": True},
    "stage3-offload": BF16
    | stage(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    | {"zero_force_ds_cpu_optimizer": False},
    "experts-stage0-fp32": {"experts": True},
    "experts-stage1-fp32": stage(1) | {"experts": True},
    "experts-stage2-bf16": BF16 | stage(2) | {"experts": True},
    "pipeline-fp32": {"pipeline": True, "gradient_accumulation_steps": 3},
    "pipeline-stage1-bf16": BF16 | stage(1) | {"pipeline": True, "gradient_accumulation_steps": 3},
    "pipeline-fp16-dynamic": DYNAMIC | {"pipeline": True, "gradient_accumulation_steps": 2},
}
# Those that have the same collectives as others: not all of them are interrupted.
SAMPLED = (
    "stage3-bf16",
    "stage3-offload",
    "stage3-fp16-dynamic",
    "stage2-offload-cpu-adam",
    "stage3-offload-cpu-adam",
)


class TrainedEngine:
    """An engine, its adapter, and batches that depend on step, micro-batch and rank."""

    def __init__(self, case: str, seed: int, other: bool = False) -> None:
        """`other`: its snapshots are full where the case's are lean, and lean where they are full."""
        # Modules and parameters are numbered as in a process of its own.
        parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        partition_parameters.Init.param_id = 0
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(seed)
        config = json.loads(json.dumps(BASE | CASES[case]))
        self.pipeline, fused = config.pop("pipeline", False), config.pop("fused", False)
        experts, tied = config.pop("experts", False), config.pop("tied", False)
        recomputed, apart = config.pop("recomputed", False), config.pop("apart", False)
        loop = config.pop("loop", False)
        lean = config.pop("full", False) is other
        model: torch.nn.Module
        if self.pipeline:
            middle = [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(2)]
            ends = TiedLayerSpec("ends", Layer, WIDTH, WIDTH)
            loss = torch.nn.functional.mse_loss
            model = PipelineModule(
                [ends, *middle, ends],
                num_stages=2,
                loss_fn=lambda x, y: loss(x.float(), y.float()),
                partition_method="uniform",
            )
        else:
            model = Experts() if experts else Tied() if tied else Counting() if loop else Net(recomputed)
        original = deepspeed.runtime.engine.FusedAdam
        if fused:  # on the CPU, torch's Adam passes for it
            deepspeed.runtime.engine.FusedAdam = torch.optim.Adam
        try:
            self.engine, *_ = deepspeed.initialize(
                model=model,
                config=config,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
            )
        finally:
            deepspeed.runtime.engine.FusedAdam = original
        self.adapter: Any = (LoopState if loop else DeepSpeedAdapter)(self.engine, lean)
        if apart:  # as a script does that loads weights of its own behind the optimizer's back
            with torch.no_grad():
                for parameter in self.engine.module.parameters():
                    parameter.mul_(0.5)
        self.ends = self.adapter.step_done if loop else lambda losses: self.adapter.compare()
        self.adapter.begin() if loop else self.adapter.compare()
        self.dtype = next(p.dtype for p in self.engine.module.parameters())
        self.accumulated = self.engine.gradient_accumulation_steps()

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for micro in range(self.accumulated):
            generator = torch.Generator().manual_seed(
                step * 100 + micro * 10 + self.engine.seq_data_parallel_group.rank()
            )
            yield (
                torch.randn(4, WIDTH, generator=generator).to(self.dtype),
                torch.randn(4, WIDTH, generator=generator).to(self.dtype),
            )

    def step(self, version: int) -> list[float]:
        """The losses of its micro batches."""
        if self.pipeline:
            losses = [self.engine.train_batch(self.batches(version + 1)).item()]
        else:
            losses = []
            for x, y in self.batches(version + 1):
                loss = self.engine(x, y)
                losses.append(loss.item())
                self.engine.backward(loss)
                self.engine.step()
        self.ends(losses)
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """Where a rank has them whole."""
        return {n: p for n, p in self.engine.module.named_parameters() if not hasattr(p, "ds_tensor")}


def run(case: str) -> int:
    """Returns how many interruptions were tried."""
    tried = check(lambda seed: TrainedEngine(case, seed), collectives, every=6 if case in SAMPLED else 1)
    check_kinds(case)
    return tried


def check_kinds(case: str) -> None:
    """A version of one kind, lean or full, is one for a job of the other kind, too."""
    trial = Trial(TrainedEngine(case, seed=1), collectives)
    assert ("apart" in case) is any(name.startswith("part.") for name in trial.snapshot().tensors)
    trial.train(0, 2)
    at2 = trial.snapshot()
    losses = trial.train(2, 4)
    at4 = trial.snapshot()
    kept = {name.partition(".")[0] for name in at4.tensors}
    assert "part" not in kept and ("flat" in kept) is ("full" in case), kept
    if "stage3" in case:  # no role records its trace again
        traces = [envelope.decode(found.envelope)["trace"] for found in (at2, at4)]
        assert traces[0] and traces[0] == traces[1]
    other = Trial(TrainedEngine(case, seed=3, other=True), collectives)
    other.restore(at2)
    other.snapshot().compare_weights(at2, "with the other kind of snapshot, restored")
    assert other.train(2, 4) == losses, "with the other kind of snapshot: losses differ"
    other.snapshot().compare_weights(at4, "with the other kind of snapshot")


def main(run: Callable[[str], int]) -> None:
    deepspeed.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    # Compiled at start-up, for inference only; a worker killed meanwhile leaves a lock behind for good.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", timeout=TIMEOUT)
    # The CPU here may not be fast at it, but can do it.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True
    run_each(run)


if __name__ == "__main__":
    main(run)
