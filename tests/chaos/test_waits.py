"""Roles that hold the others up and do not hang: they are left to it, and the run ends bit-identically."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from chaos.loading import STALLED
from deepspeed_jobs import TWICE, Zero
from harness import Job, check_clean, check_identical, check_survivors
from loading_jobs import Loading
from processes import children

from ft_core.control.liveness.hangs.detector import START_FLOOR

HERE = Path(__file__).parent
STEPS = 400


@pytest.mark.parametrize("loaders", [2, 0])
def test_who_waits_for_data_is_not_replaced(loaders: int, tmp_path: Path, monkeypatch) -> None:
    """For longer than a hang would last: the loader's process sleeps, or the worker itself, which reads."""
    stalled = tmp_path / "stalled"
    monkeypatch.setenv(STALLED, str(stalled))
    training = Loading((f"--num-workers={loaders}",))
    with Job(tmp_path / "job", training, STEPS, nproc=1, spares=0) as job:
        job.wait_for_step(3)
        stalled.touch()
        job.wait_for("stalled")
        stalled.unlink()
        result = job.finish()
    check_identical(result, training, STEPS)
    check_clean(result)
    (wait,) = result.of("stalled")
    assert wait["roles"] == [1] and "it waits for data" in wait["reason"], wait
    assert not result.of("hang") and not result.of("detected")


def test_a_loader_that_is_stopped_meanwhile_is_found(tmp_path: Path, monkeypatch) -> None:
    stalled = tmp_path / "stalled"
    monkeypatch.setenv(STALLED, str(stalled))
    training = Loading()
    with Job(tmp_path / "job", training, STEPS, nproc=1, spares=0) as job:
        job.wait_for_step(3)
        stalled.touch()
        job.wait_for("stalled")
        _, worker = job.pids(1)
        for pid in children(worker):
            os.kill(pid, signal.SIGSTOP)
        job.wait_for("hang")
        stalled.unlink()
        result = job.finish()
    check_identical(result, training, STEPS, again=1)
    check_survivors(result, training.world)
    check_clean(result)
    (hang,) = result.of("hang")
    assert hang["roles"] == [1] and hang["explained"]


@pytest.mark.timeout(300)  # a minute and a half, where the machine has nothing else to do
def test_a_newcomer_that_passes_over_many_steps_is_not_replaced(tmp_path: Path) -> None:
    """The others wait for it for longer than for one that does not get on."""
    training, steps = Zero(1, dp=2), 80
    with Job(tmp_path / "job", training, steps, nproc=1, script=HERE / "catching_up_clm.py") as job:
        job.wait_for("resumed")
        done = job.wait_for_step(30)
        (tmp_path / "job.slow").touch()
        os.kill(job.pids(1)[1], signal.SIGKILL)
        job.wait_for_epoch("resumed", 2, timeout=110)
        result = job.finish()
    check_identical(result, training, steps, again=TWICE)
    check_survivors(result, training.world)
    check_clean(result)
    (restored,) = [e for e in result.of("state_restored") if e["epoch"] == 2]
    (resumed,) = [e for e in result.of("resumed") if e["epoch"] == 2]
    assert resumed["time"] - restored["time"] > START_FLOOR and restored["version"] >= 30, done
    assert not result.of("hang")
