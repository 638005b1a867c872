"""Run by torchrun for test_state.py: train, interrupt each collective of a step in turn, restore, compare.

Arguments: where each rank writes its results, with its number as suffix (JSON: case -> how often it was
interrupted, or a traceback), then the names of cases.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

TIMEOUT = timedelta(seconds=20)
COLLECTIVES = (
    "all_reduce all_reduce_coalesced broadcast broadcast_object_list reduce reduce_scatter "
    "reduce_scatter_tensor all_gather all_gather_into_tensor all_gather_object barrier "
    "all_to_all_single all_to_all send recv isend irecv"
).split()


class Interrupted(Exception):  # noqa: N818
    pass


class Collectives:
    """Counts this rank's collectives and waits, and raises in place of a given one."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.stop: int | None = None

    def passed(self, kind: str, ranks: tuple[int, ...]) -> None:
        if self.stop is not None and len(self.log) >= self.stop:
            raise Interrupted(f"{kind} {ranks}")
        self.log.append((kind, ranks))

    def begin(self, stop: int | None = None) -> None:
        self.log, self.stop = [], stop

    def install(self) -> None:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name in ("send", "recv", "isend", "irecv"):
                peer = kwargs.get("dst", kwargs.get("src", args[1] if len(args) > 1 else None))
                ranks = tuple(sorted((dist.get_rank(), peer)))
                kind = "p2p"
            else:
                ranks, kind = tuple(dist.get_process_group_ranks(kwargs.get("group"))), name
            self.passed(kind, ranks)
            result = original(*args, **kwargs)
            return Handle(result, self) if hasattr(result, "wait") else result

        return counted


class Handle:
    def __init__(self, work: Any, collectives: Collectives) -> None:
        self._work, self._collectives = work, collectives

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._collectives.passed("wait", (dist.get_rank(),))
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def cuts(log: list[tuple[str, tuple[int, ...]]]) -> Iterator[int]:
    """After how many of its operations this rank is interrupted, for each moment of the step in turn.

    A moment is one that all ranks can be stopped at: everybody's operations before it are complete.
    """
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, log)
    heads = [0] * len(logs)
    while True:
        if all(head == len(log) for head, log in zip(heads, logs, strict=True)):
            return
        yield heads[dist.get_rank()]
        ready = [log[head] if head < len(log) else None for head, log in zip(heads, logs, strict=True)]
        done = [r for r, op in enumerate(ready) if op and all(ready[peer] == op for peer in op[1])]
        assert done, f"no operation can complete: {ready}"
        heads = [head + (rank in done) for rank, head in enumerate(heads)]


@functools.cache
def shared_group(new_group: Callable[..., Any], ranks: tuple[int, ...] | None) -> Any:
    """The newcomer's groups are those its peers have already, as they are under ft_core."""
    return new_group(ranks, timeout=TIMEOUT)


collectives = Collectives()
collectives.install()  # before DeepSpeed takes references
dist.new_group = functools.partial(
    lambda original, ranks=None, **_: shared_group(original, tuple(ranks) if ranks is not None else None),
    dist.new_group,
)

import deepspeed  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.zero import parameter_offload, partition_parameters  # noqa: E402

from ft_core.state import envelope  # noqa: E402
from ft_deepspeed.state import DeepSpeedAdapter  # noqa: E402

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


Snapshot = tuple[dict[str, torch.Tensor], bytes, dict[str, torch.Tensor]]
"""The adapter's tensors and envelope; and the weights, where a rank has them whole."""


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
            model = Experts() if experts else Tied() if tied else Net(recomputed)
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
        self.adapter = DeepSpeedAdapter(self.engine, lean)
        if apart:  # as a script does that loads weights of its own behind the optimizer's back
            with torch.no_grad():
                for parameter in self.engine.module.parameters():
                    parameter.mul_(0.5)
        self.adapter.compare()
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

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            if self.pipeline:
                losses.append(self.engine.train_batch(self.batches(step)).item())
                self.adapter.compare()
                continue
            for x, y in self.batches(step):
                loss = self.engine(x, y)
                losses.append(loss.item())
                self.engine.backward(loss)
                self.engine.step()
            self.adapter.compare()
        return losses

    def snapshot(self) -> Snapshot:
        names = [t.name for t in self.adapter.tensors()]
        assert len(names) == len(set(names)), names
        weights = self.engine.module.named_parameters()
        return (
            {t.name: t.tensor.detach().clone() for t in self.adapter.tensors()},
            envelope.encode(self.adapter.envelope()),
            {n: p.detach().clone() for n, p in weights if not hasattr(p, "ds_tensor")},
        )

    def restore(self, snapshot: Snapshot, stop: int | None = None) -> None:
        self.adapter.reset()
        self.adapter.restore(snapshot[0], envelope.decode(snapshot[1]))
        collectives.begin(stop)
        try:
            self.adapter.derive()
        except Interrupted:
            pass
        finally:
            collectives.stop = None


def compare(found: Snapshot, expected: Snapshot, where: str) -> None:
    tensors, text, _ = found
    compare_weights(found, expected, where)
    assert list(tensors) == list(expected[0]), f"{where}: {list(tensors)} is not {list(expected[0])}"
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[0][name]), f"{where}: {name} differs"
    if text != expected[1]:
        here, there = envelope.decode(text), envelope.decode(expected[1])
        different = {k: (here[k], there[k]) for k in here if repr(here[k]) != repr(there[k])}
        raise AssertionError(f"{where}: the envelope differs: {different}")


def compare_weights(found: Snapshot, expected: Snapshot, where: str) -> None:
    for name, weight in found[2].items():
        assert torch.equal(weight, expected[2][name]), f"{where}: {name} differs"


def run(case: str) -> int:
    """Returns how many interruptions were tried."""
    job = TrainedEngine(case, seed=1)
    initial = job.snapshot()
    assert ("apart" in case) is any(name.startswith("part.") for name in initial[0])
    early = job.train(1, 2)
    at2 = job.snapshot()
    losses = job.train(3, 4)
    at4 = job.snapshot()
    check_holders(job, at4)
    kept = {name.partition(".")[0] for name in at4[0]}
    assert "part" not in kept and ("flat" in kept) is ("full" in case), kept
    if "stage3" in case:  # no role records its trace again
        assert (trace := envelope.decode(at2[1])["trace"]) and trace == envelope.decode(at4[1])["trace"]

    def again(where: str) -> None:
        job.restore(at2)
        compare(job.snapshot(), at2, f"{where}, restored")
        assert job.train(3, 4) == losses, f"{where}: losses differ"
        compare(job.snapshot(), at4, where)

    again("undisturbed")
    collectives.begin()
    job.train(5, 5)
    steady = list(cuts(collectives.log))
    again("after a whole step")
    sparse = 6 if case in SAMPLED else 1
    for stop in steady[::sparse]:
        interrupt(job, 5, stop)
        again(f"interrupted in the step's operation {stop} of {len(steady)}")
    job.restore(at2)
    gathers = list(cuts(collectives.log))
    for stop in gathers:
        interrupt(job, 3, steady[-1])
        job.restore(at2, stop)
        again(f"interrupted in the operation {stop} of {len(gathers)} that make the weights whole")
    first: list[int] = []
    if "stage3" in case or job.pipeline:  # their first step after a restore communicates more
        job.restore(at2)
        collectives.begin()
        job.train(3, 3)
        first = list(cuts(collectives.log))
        for stop in first[:: 3 * sparse]:
            job.restore(at2)
            interrupt(job, 3, stop)
            again(f"interrupted in the first step's operation {stop} of {len(first)}")

    job.restore(initial)
    compare(job.snapshot(), initial, "restored to the beginning")
    assert job.train(1, 2) == early, "from the beginning: losses differ"
    compare(job.snapshot(), at2, "from the beginning")

    other = TrainedEngine(case, seed=3, other=True)
    other.restore(at2)
    compare_weights(other.snapshot(), at2, "with the other kind of snapshot, restored")
    assert other.train(3, 4) == losses, "with the other kind of snapshot: losses differ"
    compare_weights(other.snapshot(), at4, "with the other kind of snapshot")

    newcomer = TrainedEngine(case, seed=2)
    if dist.get_rank() == dist.get_world_size() - 1:
        job = newcomer
    job.restore(at2)
    compare(job.snapshot(), at2, "with a newcomer, restored")
    assert job.train(3, 4) == losses, "with a newcomer: losses differ"
    compare(job.snapshot(), at4, "with a newcomer")
    return len(steady[::sparse]) + len(first[:: 3 * sparse])


def interrupt(job: TrainedEngine, step: int, stop: int) -> None:
    collectives.begin(stop)
    try:
        job.train(step, step)
    except Interrupted:
        pass
    finally:
        collectives.begin()


def check_holders(job: TrainedEngine, snapshot: Any) -> None:
    """Those who are said to have the same do have the same, and they agree on it."""
    mine = {t.name: t.holders for t in job.adapter.tensors()}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (mine, snapshot[0]))
    for name, holders in mine.items():
        assert dist.get_rank() in holders, name
        for peer in holders:
            assert everybody[peer][0][name] == holders, f"{name}: {peer} disagrees on the holders"
            assert torch.equal(everybody[peer][1][name], snapshot[0][name]), f"{name}: {peer} has another"


def main(run: Callable[[str], int]) -> None:
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    deepspeed.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    # Compiled at start-up, for inference only; a worker killed meanwhile leaves a lock behind for good.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", timeout=TIMEOUT)
    # The CPU here may not be fast at it, but can do it.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True
    results: dict[str, Any] = {}
    for case in cases:
        collectives.begin()
        try:
            results[case] = run(case)
        except Exception:
            results[case] = traceback.format_exc()
        out.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(results))
        if isinstance(results[case], str):
            print(results[case], file=sys.stderr, flush=True)
            sys.exit(1)  # the ranks may be out of step


if __name__ == "__main__":
    main(run)
