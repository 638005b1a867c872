"""Errors of a script, and ends of its own making: tried once more where that may help, and never a hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_jobs import TWICE, Zero
from harness import Job, Layout, Training, check_clean, check_identical, check_survivors

STEPS = 8
MEGATRON, DEEPSPEED = Layout(1, 1, 2, distributed=True), Zero(2, dp=2)
AT = "1@forward:4"


@pytest.mark.parametrize(
    ("training", "how"),
    [
        (MEGATRON, "error"),
        (DEEPSPEED, "error"),
        (MEGATRON, "memory"),
        pytest.param(DEEPSPEED, "memory", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_an_exception_restarts_its_worker_from_memory(training: Training, how: str, tmp_path: Path):
    ftrun = ("--ft-inject", f"{AT}:{how}")
    with Job(tmp_path / "job", training, STEPS, spares=0, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, training, STEPS, again=TWICE)
    check_survivors(result, training.world)
    check_clean(result)
    [failure] = result.of("detected")
    assert failure["roles"] == [1] and "injected by --ft-inject" in failure["reason"]
    assert result.recoveries == 1


@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED], ids=str)
@pytest.mark.parametrize(
    ("injected", "code", "said", "recoveries"),
    [
        pytest.param(
            *(f"{AT}:errors", 1, "the same again in the step after version 4", 1),
            marks=pytest.mark.exhaustive,
        ),
        (f"0@forward:4:errors,{AT}:errors", 1, "the same again in the step after version 4", 1),
        (f"{AT}:exit", 3, "exit code 3: sys.exit(3); the script wants it to end", 0),
        (f"{AT}:_exit", 5, "exit code 5; the script wants it to end", 0),
    ],
    ids=["twice", "twice-everywhere", "sys.exit", "os._exit"],
)
def test_what_ends_the_job(
    injected: str, code: int, said: str, recoveries: int, training: Training, tmp_path: Path
):
    with Job(tmp_path / "job", training, STEPS, spares=0, ftrun=("--ft-inject", injected)) as job:
        result = job.finish(90)
    assert result.code == code, result.output[-4000:]
    assert "ftrun: the job stops: worker" in result.output and said in result.output
    if recoveries:
        assert "RuntimeError: injected by --ft-inject" in result.output
    assert result.recoveries == recoveries
    check_clean(result)
