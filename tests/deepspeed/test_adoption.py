"""Ranks of DeepSpeed's ZeRO that hold, beside their own, the state that another rank has alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cases import check_cases

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

HERE = Path(__file__).parent

LAUNCHES = {
    "zero12": (
        3,
        "stage1-fp32 stage1-bf16 stage1-fp32-accumulated stage1-fp16-fp32-gradients-accumulated stage2-fp32 "
        "stage2-bf16-accumulated stage2-fp16-dynamic stage2-overlap stage2-gathered-buckets "
        "stage2-reduced-whole stage2-bf16-fp32-gradients-accumulated "
        "stage2-bf16-fp32-gradients-reduced-whole stage2-timers stage2-round-robin",
    ),
    "pipeline": (4, "pipeline-stage1-bf16"),
    "zero3": (
        3,
        "stage3-fp32 stage3-bf16-accumulated stage3-fp16-dynamic stage3-recomputed stage3-autocast "
        "stage3-bf16-whole",
    ),
}
"""One launch each, since importing DeepSpeed takes long: how many ranks, and the cases."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_adopted_like_own(name: str, tmp_path: Path) -> None:
    """After every step, what a rank has adopted is bit by bit what the other one has, or would have."""
    ranks, cases = LAUNCHES[name]
    worker = HERE / ("adoption3_worker.py" if name == "zero3" else "adoption_worker.py")
    check_cases(worker, ranks, cases, tmp_path / name)
