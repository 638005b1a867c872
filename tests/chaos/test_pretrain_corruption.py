"""A bit that flips in a job of `megatron.training.pretrain` is found, and undone."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job
from megatron_jobs import Pretrain, check_log, reference

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

ITERATIONS = 8
FTRUN = ("--ft-verify", "--respawn", "--ft-inject", "1@optimizer:3:weight,0@optimizer:5:moment")


def test_a_flipped_bit(tmp_path: Path) -> None:
    training = Pretrain(world=2)
    expected = reference(training, ITERATIONS, tmp_path / "plain")
    with Job(tmp_path / "job", training, ITERATIONS, nproc=1, ftrun=FTRUN) as job:
        result = job.finish()
    assert result.code == 0, result.output[-4000:]
    check_log(result, expected)
    assert [event["roles"] for event in result.of("corruption")] == [[1], [0]]
    assert [event["version"] for event in result.of("decided")] == [None, 3, 5]
