"""DeepSpeed's state under real engines: interrupted at every collective of a step, restored, compared."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import run_cases

from ft_core.errors import ConfigError

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

HERE = Path(__file__).parent

# One launch each, since importing DeepSpeed takes long: how many ranks, and the cases.
LAUNCHES: dict[str, tuple[int, str]] = {
    "without-zero": (
        2,
        "stage0-fp32 stage0-fp32-sgd stage0-fp16-static stage0-fp16-dynamic stage0-fp16-fused stage0-bf16 "
        "stage0-autocast stage1-bf16-fp32-gradients stage1-bf16-fp32-gradients-accumulated",
    ),
    "zero12": (
        2,
        "stage1-fp32 stage1-bf16 stage1-fp32-accumulated stage2-fp32 stage2-bf16-accumulated "
        "stage2-fp16-dynamic stage2-autocast stage2-overlap stage2-gathered-buckets stage2-timers "
        "stage2-offload stage1-fp32-full stage2-bf16-full "
        "stage1-fp32-apart stage2-fp16-dynamic-apart stage2-bf16-loop",
    ),
    "zero3": (
        2,
        "stage3-fp32 stage3-bf16 stage3-bf16-accumulated stage3-fp16-dynamic stage3-offload "
        "stage3-recomputed stage3-autocast-tied",
    ),
    "four-ranks": (4, "experts-stage0-fp32 experts-stage1-fp32 stage2-round-robin"),
    "pipeline": (2, "pipeline-fp32 pipeline-stage1-bf16 pipeline-fp16-dynamic"),
    "cpu-adam": (2, "stage2-offload-cpu-adam stage3-offload-cpu-adam"),
}


NVME = {"device": "nvme", "nvme_path": "/tmp"}
TWIN = {"device": "cpu", "ratio": 0.4}
SUPER = {"device": "cpu", "super_offload": True}


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


@functools.cache
def launch(name: str, directory: Path) -> tuple[str, list[dict[str, int | str]]]:
    """Run a launch's cases. Returns what it printed, and each rank's results."""
    ranks, cases = LAUNCHES[name]
    timeout = 600 if name == "cpu-adam" else 110
    return run_cases(HERE / "state_worker.py", ranks, cases, directory / name, timeout)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        # DeepSpeed compiles its CPU Adam first, which takes minutes in a new environment.
        pytest.param(name, case, marks=pytest.mark.exhaustive if name == "cpu-adam" else ())
        for name, (_, cases) in LAUNCHES.items()
        for case in cases.split()
    ],
)
def test_interrupted_anywhere(name: str, case: str, directory: Path) -> None:
    output, results = launch(name, directory)
    failures = [f"rank {rank}: {r[case]}" for rank, r in enumerate(results) if isinstance(r.get(case), str)]
    assert not failures, "\n".join(failures)
    assert all(case in r for r in results), (
        f"not reached: an earlier case failed, or the launch:\n{output[-3000:]}"
    )
    assert all(r[case] for r in results), "no collective was interrupted"


def engine(config: dict[str, Any], optimizer: Any = None) -> Any:
    """As much of an engine as is looked at to tell whether its configuration is covered."""
    from deepspeed.runtime.config import DeepSpeedConfig

    weight = torch.nn.Parameter(torch.zeros(1))
    return SimpleNamespace(
        _config=DeepSpeedConfig({"train_batch_size": 1} | config),
        optimizer=optimizer or torch.optim.SGD([weight], lr=0.1),
    )


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("zero_optimization.offload_optimizer.device", zero(3, offload_optimizer=NVME)),
        ("zero_optimization.offload_param.device", zero(3, offload_param=NVME)),
        ("zero_optimization.offload_optimizer.super_offload", zero(3, offload_optimizer=SUPER)),
        ("zero_optimization.zero_hpz_partition_size", zero(3, zero_hpz_partition_size=2)),
        ("zero_optimization.zero_quantized_weights", zero(3, zero_quantized_weights=True)),
        ("zero_optimization.zero_quantized_gradients", zero(3, zero_quantized_gradients=True)),
        ("zero_optimization.zenflow", zero(2, zenflow={"topk_ratio": 0.1})),
        ("compile.deepcompile", {"compile": {"deepcompile": True}}),
        ("optimizer.type", {"optimizer": {"type": "OneBitAdam"}}),
        ("optimizer.type", {"optimizer": {"type": "Muon"}}),
        ("zero_optimization.offload_optimizer.ratio", zero(3, offload_optimizer=TWIN)),
    ],
)
def test_uncovered_configurations_name_the_key_to_change(key: str, config: dict[str, Any]) -> None:
    from ft_deepspeed.zero import check

    with pytest.raises(ConfigError, match=rf"^{key} .* cannot go with fault_tolerance: .*; or set"):
        check(engine(config))


def test_an_optimizer_that_is_no_part_of_the_configuration() -> None:
    from ft_deepspeed.zero import check

    class OnebitAdam(torch.optim.SGD):
        """As much of DeepSpeed's as is looked at."""

    optimizer = OnebitAdam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=r'^optimizer\.type "OnebitAdam" cannot go with fault_tolerance'):
        check(engine({}, optimizer))
    nothing = engine({})
    nothing.optimizer = None
    with pytest.raises(ConfigError, match=r"^the engine has no optimizer"):
        check(nothing)


def test_covered_configurations() -> None:
    from ft_deepspeed.zero import check

    for config in ({}, zero(1), zero(2, offload_optimizer={"device": "cpu"}), zero(3, overlap_comm=True)):
        check(engine(config))
