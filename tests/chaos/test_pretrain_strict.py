"""Layouts of `pretrain()` under NCCL's rules (`ft_core.comm.strict`); see `test_strict.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.test_pretrain_layouts import ITERATIONS, SAVED
from megatron_jobs import LAYOUTS, survives

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

PLACES = {
    "tp2pp2-bf16": "3@backward:3:worker",
    "pp2-interleaved-overlap": "2@forward:3",
    "cp2": "1@gradients:3:worker",
    "ep2": "0@optimizer:3",
    "dp4-bf16-overlap-param": "2@between:2:worker",
}
"""Layout -> where a role is lost."""


@pytest.mark.parametrize("name", PLACES)
def test_layout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_COMM", "strict")
    # With context parallelism two ranks of Megatron's write the one file of format torch at the same time.
    saved = SAVED[:1] if name.startswith("cp") else SAVED
    survives(LAYOUTS[name], ITERATIONS, (PLACES[name],), tmp_path, *saved)
