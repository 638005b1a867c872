"""Standbys start roles ahead of need, and take them over when workers of whole jobs die."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_jobs import Zero
from harness import Job, Layout, Training, check_identical
from standby_jobs import lose_nodes, lose_workers

HERE = Path(__file__).parent
STEPS = 60


@pytest.mark.timeout(300)  # half a minute, where the machine has nothing else to do
@pytest.mark.parametrize(
    ("training", "nproc", "script"),
    [
        (Layout(1, 1, 2, distributed=True), 1, HERE / "resting_core.py"),
        (Layout(2, 1, 2, distributed=True, bf16=True), 2, HERE / "resting_core.py"),
        (Zero(1, dp=2, bf16=True), 1, HERE / "resting_clm.py"),
        (Zero(3, dp=2), 1, HERE / "resting_clm.py"),
    ],
    ids=lambda value: str(value) if not isinstance(value, int | Path) else None,
)
def test_standbys_take_over(training: Training, nproc: int, script: Path, tmp_path: Path):
    ftrun = (f"--ft-ready-standbys={nproc}",)
    about = {"nproc": nproc, "spares": 0, "script": script, "ftrun": ftrun}
    with Job(tmp_path / "job", training, STEPS, **about) as job:
        recoveries = lose_workers(job, training.world)
        result = job.finish()
    check_identical(result, training, STEPS, again=recoveries)
    assert result.recoveries == recoveries


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("training", "nproc", "script"),
    [
        (Layout(1, 1, 2, distributed=True, bf16=True), 1, HERE / "resting_core.py"),
        (Layout(2, 1, 2, distributed=True), 2, HERE / "resting_core.py"),
        (Zero(3, dp=2), 1, HERE / "resting_clm.py"),
    ],
    ids=lambda value: str(value) if not isinstance(value, int | Path) else None,
)
def test_a_spare_takes_over(training: Training, nproc: int, script: Path, tmp_path: Path):
    about = {"nproc": nproc, "spares": 1, "script": script, "ftrun": (f"--ft-ready-standbys={nproc}",)}
    with Job(tmp_path / "job", training, STEPS, **about) as job:
        recoveries = lose_nodes(job, training.world)
        result = job.finish()
    check_identical(result, training, STEPS, again=recoveries)
    assert result.recoveries == recoveries
