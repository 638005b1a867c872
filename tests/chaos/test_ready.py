"""Standbys start roles ahead of need, and take them over when workers of whole jobs die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from deepspeed_jobs import Zero
from harness import Job, Layout, Training, check_identical
from megatron_jobs import Pretrain, check_log, reference

HERE = Path(__file__).parent
STEPS = 60


def standby(job: Job, role: int, but: int = 0) -> int:
    """The pid of the one that is ready for that role, once there is one, other than `but`."""

    def found() -> int:
        pid = next(row["ready"] for row in job.status()["roles"] if row["role"] == role) or 0
        return 0 if pid == but else pid

    return job.until(found, f"a standby for role {role}", timeout=120)


def kill(job: Job, role: int) -> int:
    """The pid of the role's worker after its worker was killed, and all go on."""
    _, worker = job.pids(role)
    before = job.wait_for("resumed")[-1]["epoch"]
    os.kill(worker, signal.SIGKILL)
    job.wait_for_epoch("resumed", before + 1)
    return job.pids(role)[1]


def lose_workers(job: Job, world: int) -> int:
    """All that standbys must get over; returns how many recoveries that takes."""
    last = world - 1
    job.wait_for("resumed")
    ready = {role: standby(job, role) for role in range(world)}
    assert kill(job, last) == ready[last]
    assert {role: standby(job, role) for role in range(last)} == {role: ready[role] for role in range(last)}
    assert kill(job, 0) == ready[0], "through an epoch in which it was not needed"
    assert "a standby had started it ahead of need" in job.ctl("timeline")
    epoch = job.wait_for("resumed")[-1]["epoch"]
    victim = standby(job, last)
    os.kill(victim, signal.SIGKILL)
    again = standby(job, last, but=victim)
    assert job.wait_for("resumed")[-1]["epoch"] == epoch, "nobody minds that one is lost"
    assert kill(job, last) == again
    assert kill(job, last) != again, "twice in a row: the second time no other is ready yet, perhaps"
    return 4


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
def test_standbys_of_megatrons_own_loop(tmp_path: Path):
    training = Pretrain(tp=2, more=("--use-distributed-optimizer", "--bf16"))
    text = reference(training, STEPS, tmp_path / "plain")
    about = {"nproc": 2, "spares": 0, "script": HERE / "resting_pretrain.py"}
    with Job(tmp_path / "job", training, STEPS, ftrun=("--ft-ready-standbys=2",), **about) as job:
        recoveries = lose_workers(job, training.world)
        result = job.finish()
    check_log(result, text)
    assert result.recoveries == recoveries
