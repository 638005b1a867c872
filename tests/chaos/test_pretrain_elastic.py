"""`pretrain()` with policy `shrink`: replica groups leave and come back, and nothing else changes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from elastic_jobs import STRIDE, go_on, lasting_losses, states, wait_for_return
from harness import Job, check_clean, read_logs, undisturbed
from megatron_jobs import LATEST, Pretrain, compare_checkpoints, losses

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")
pytestmark = pytest.mark.timeout(300)

STEPS = 40
LOSS = r" iteration +(\d+)/.*lm loss: (\S+)"


@dataclass(frozen=True)
class Groups(Pretrain):
    """The recipe that tells its state; `told` by a ledger, if it is not given fault tolerance."""

    told: str = ""

    @property
    def script(self) -> Path:
        return Path(__file__).with_name("pretrain_steps.py")

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **({"FT_TOLD": self.told} if self.told else {})}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.exhaustive, id="plain"),
        pytest.param(("--use-distributed-optimizer",), id="sharded"),
    ],
)
def test_groups_leave_and_return(more: tuple[str, ...], tmp_path: Path) -> None:
    """The last group first, whose role writes the log; saved at the end, when all are there."""
    layout = {"world": 3, "more": ("--global-batch-size=12", "--bf16", "--save-interval=1000", *more)}
    job_dir, saved, expected = (tmp_path / name for name in ("job", "saved", "expected"))
    dice = random.Random(5)
    with Job(job_dir, Groups(**layout), STEPS, spares=0, ftrun=("--ft-policy=shrink", "--respawn"),
             flags=("--save", str(saved))) as job:  # fmt: skip
        epoch, step = 1, STRIDE
        go_on(job, step)
        job.wait_for_epoch("resumed", 1, timeout=120)
        for role in (2, 1):
            time.sleep(dice.uniform(0.0, 0.5))
            job.kill_nodes(role)
            epoch = job.wait_for_epoch("left", epoch + 1)["epoch"]
            step += STRIDE // 2
            go_on(job, step)
            epoch = wait_for_return(job, epoch)["epoch"]
            step += STRIDE // 2
            go_on(job, step)
            job.wait_for_epoch("resumed", epoch)
        go_on(job, STEPS + 1)
        result = job.finish()
    check_clean(result)
    assert result.code == 0, result.output[-3000:]
    told = Groups(**layout, told=str(job_dir / "ledger.jsonl"))
    reference = undisturbed(told, STEPS, "--save", str(expected))
    text = read_logs(job_dir)
    assert "could not rehearse" not in result.output
    if more:
        # A step that was done before a shard was lost with its group is done again, and logged again.
        found = lasting_losses(text, result.events, LOSS)
        assert found == lasting_losses(reference.output, (), LOSS)
        assert sorted(found) == list(range(1, STEPS + 1))
    else:
        assert sorted(losses(text)) == losses(reference.output), "each step has one line"
    right, found = states(reference.output), states(text, result.events)
    assert sorted(found) == sorted(right) == list(range(1, STEPS + 1))
    for after, ranks in found.items():
        for rank, digests in ranks.items():
            assert digests == right[after][rank], f"role {rank} after step {after}"
    assert any(len(ranks) < 3 for ranks in found.values()), "no step was done without a group"
    compare_checkpoints(*(d / f"iter_{STEPS:07d}" for d in (expected, saved)))
    assert (saved / LATEST).read_text() == str(STEPS)
