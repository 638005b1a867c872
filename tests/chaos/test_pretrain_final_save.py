"""Megatron-LM's own loop, ended by an error: started again, it logs and saves what it does undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job, check_clean, read_logs
from megatron_jobs import DISTOPT, Pretrain, compare_checkpoints, losses, reference

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

TRAINING = Pretrain(world=2, more=DISTOPT)
STEPS, FAILS = 8, 4
SAVES = (f"--save-interval={STEPS}",)


@pytest.mark.timeout(300)  # a minute, where the machine has nothing else to do
def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    expected, saved = tmp_path / "expected", tmp_path / "saved"
    text = reference(TRAINING, STEPS, tmp_path / "plain", *SAVES, "--save", str(expected))
    durable = f"--ft-durable-dir={tmp_path / 'durable'}"
    error = ("--ft-inject", f"1@forward:{FAILS}:errors", "--max-restarts=0")
    with Job(tmp_path / "first", TRAINING, STEPS, spares=0, ftrun=(durable, *error)) as job:
        first = job.finish()
    assert first.code == 1, first.output[-4000:]
    [event] = first.of("saved")
    assert event["version"] == FAILS
    check_clean(first)
    flags = (*SAVES, "--save", str(saved))
    with Job(tmp_path / "second", TRAINING, STEPS, spares=0, ftrun=(durable,), flags=flags) as job:
        second = job.finish()
    assert second.code == 0, second.output[-4000:]
    [began] = second.of("decided")
    assert (began["origin"], began["version"]) == ("durable", FAILS)
    logged = {*losses(read_logs(tmp_path / "first")), *losses(read_logs(tmp_path / "second"))}
    assert sorted(logged) == losses(text)
    [name] = [path.name for path in expected.glob("iter_*")]
    compare_checkpoints(expected / name, saved / name)
