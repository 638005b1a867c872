"""Megatron-Core's state, interrupted at every collective of a step, restored, compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import check_cases

LAUNCHES = {
    "data-parallel": "plain-fp32 plain-fp16 sharded-fp32 sharded-bf16-lean sharded-bf16-overlapped "
    "sharded-gathered-late sharded-instances",
    "model-parallel": "tp2-bf16 pp2-fp16-sharded",
}
"""One launch each, since importing Megatron takes long."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_interrupted_anywhere(name: str, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("conformance_worker.py")
    check_cases(worker, 2, LAUNCHES[name], tmp_path / name)
