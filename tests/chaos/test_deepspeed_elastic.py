"""DeepSpeed's replica groups leave and come back while the others train on (policy `shrink`)."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from deepspeed_jobs import Pipeline, Zero, variables
from elastic_jobs import STRIDE, go_on, states
from harness import Job, Result, check_clean, read_logs, torchrun

from ft_core.ledger_check import verify

SCRIPT = Path(__file__).with_name("deepspeed_elastic_steps.py")
STEPS = 60
SAMPLES = ("--train-samples=100", "--dropout=0")
"""An epoch of them has fewer steps than a stride."""


@dataclass(frozen=True)
class Plain(Zero):
    """Data parallelism by the recipe that tells its state; `told` by a ledger, without fault tolerance."""

    policy: str = "shrink"
    more: tuple[str, ...] = SAMPLES
    told: str = ""

    @property
    def script(self) -> Path:
        return SCRIPT

    def config(self) -> dict:
        return super().config() | {"dataloader_drop_last": True}

    def environment(self) -> dict[str, str]:
        return variables() | ({"FT_TOLD": self.told} if self.told else {})


@dataclass(frozen=True)
class Pipelines(Pipeline):
    """The same over pipelines."""

    policy: str = "shrink"
    more: tuple[str, ...] = SAMPLES
    told: str = ""

    @property
    def script(self) -> Path:
        return SCRIPT

    def environment(self) -> dict[str, str]:
        return variables() | ({"FT_TOLD": self.told} if self.told else {})


Groups = Plain | Pipelines


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("groups", "nproc", "seed"),
    [(Plain(0, gas=2), 1, 1), pytest.param(Pipelines(dp=3, gas=2), 2, 2, marks=pytest.mark.exhaustive)],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_groups_leave_and_return(groups: Groups, nproc: int, seed: int, tmp_path: Path) -> None:
    """One is lost, comes back, and another is lost, at random moments; then as in a run that is told."""
    dice = random.Random(seed)
    job_dir = tmp_path / "job"
    job_dir.mkdir()
    with Job(job_dir, groups, STEPS, nproc=nproc, spares=0) as job:
        step = STRIDE
        go_on(job, step)
        job.wait_for_step(3, timeout=90)
        lost, then = dice.sample(range(groups.world), 2)
        time.sleep(dice.uniform(0.0, 0.5))
        os.killpg(job.pids(lost)[0], signal.SIGKILL)
        epoch = job.wait_for_epoch("left", 2)["epoch"]
        go_on(job, step := step + STRIDE)
        job.join()
        epoch = job.wait_for_epoch("returned", epoch + 1, timeout=120)["epoch"]
        job.wait_for_epoch("state_restored", epoch)
        go_on(job, step := step + STRIDE)
        job.wait_for_step(step - STRIDE // 2)
        time.sleep(dice.uniform(0.0, 0.5))
        os.killpg(job.pids(then)[0], signal.SIGKILL)
        job.wait_for_epoch("left", epoch + 1)
        go_on(job, STEPS + 1)
        result = job.finish()
    check_clean(result)
    assert result.code == 0, result.output[-3000:]
    check_told(result, groups)


def check_told(result: Result, groups: Groups) -> None:
    """Every sample once; all groups alike after every step; all as in a run that knew it beforehand."""
    assert result.job_dir is not None
    ledger = result.job_dir / "ledger.jsonl"
    report = verify(ledger.read_text().splitlines())
    assert not report.problems
    assert report.steps == STEPS
    reference = torchrun(type(groups)(**vars(groups) | {"told": str(ledger)}), STEPS)
    expected, found = states(reference.output), states(read_logs(result.job_dir))
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step, ranks in found.items():
        for rank, digests in ranks.items():
            assert digests == expected[step][rank], f"role {rank} after step {step}"
    assert any(len(ranks) < groups.world for ranks in found.values()), "no step was done without a group"
    assert result.digest == reference.digest
