"""`megatron.training.pretrain` under `ftrun` with `--ft`: killed wherever it may be, it ends bit-identically.

Whatever Megatron writes is compared with a run without fault tolerance: its checkpoints, tensor by tensor,
and the lines of its log.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job, check_clean, check_survivors
from megatron_jobs import DISTOPT, Pretrain, check_log, compare_checkpoints, reference

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

EVALUATION = ("--eval-interval=6", "--eval-iters=2")
SAVES = 12
"""Iterations between checkpoints. Those after the last step come on top, as the evaluations do."""

EVERYWHERE = (
    "3@startup:0:worker",
    "0@forward:2",
    "2@backward:5:worker",
    "3@evaluate:6:worker",
    "1@gradients:8:worker",
    "2@optimizer:10",
    "0@save:12:worker",
    "3@between:15:worker",
    "1@evaluate:18:worker",
    "3@gather:20",
    "3@save:31:worker",
    "0@evaluate:32:worker",
)
"""Training, evaluation, saving, between two steps; whole nodes, role 0's too.

After the last step, the loop's end and each evaluation and checkpoint count as one step more.
"""


def test_everywhere(tmp_path: Path) -> None:
    survives(Pretrain(pp=2, more=(*DISTOPT, "--bf16", *EVALUATION)), 30, EVERYWHERE, tmp_path)


def survives(training: Pretrain, iterations: int, injected: tuple[str, ...], directory: Path) -> None:
    """Killed in all these places, it logs and saves what it does undisturbed."""
    expected, saved = directory / "expected", directory / "saved"
    every = f"--save-interval={SAVES}"
    text = reference(training, iterations, directory / "plain", "--save", str(expected), every)
    flags = ("--save", str(saved), every)
    ftrun = ("--respawn", "--ft-inject", ",".join(injected))
    with Job(directory / "job", training, iterations, nproc=2, ftrun=ftrun, flags=flags) as job:
        result = job.finish()
    check_log(result, text)
    check_survivors(result, training.world)
    steps = [path.name for path in sorted(expected.glob("iter_*"))]
    assert [path.name for path in sorted(saved.glob("iter_*"))] == steps
    for step in steps:
        compare_checkpoints(expected / step, saved / step)
    fired = {path.name for path in (directory / "job").glob("injected-*")}
    assert len(fired) == len(injected), f"not every failure happened: {sorted(fired)}"
    check_clean(result)
