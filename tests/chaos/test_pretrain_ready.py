"""Standbys that have started Megatron-LM's own loop ahead of need."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job
from megatron_jobs import Pretrain, check_log, reference
from standby_jobs import lose_workers

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

HERE = Path(__file__).parent
STEPS = 60


@pytest.mark.timeout(300)
def test_standbys_take_over(tmp_path: Path):
    training = Pretrain(tp=2, world=2, more=("--use-distributed-optimizer", "--bf16"))
    text = reference(training, STEPS, tmp_path / "plain")
    about = {"nproc": 2, "spares": 0, "script": HERE / "resting_pretrain.py"}
    with Job(tmp_path / "job", training, STEPS, ftrun=("--ft-ready-standbys=2",), **about) as job:
        recoveries = lose_workers(job, training.world)
        result = job.finish()
    check_log(result, text)
    assert result.recoveries == recoveries
