"""DeepSpeed's replica groups leave and come back while the others train on (policy `shrink`)."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from deepspeed_jobs import Pipeline, Zero, variables
from elastic_jobs import STRIDE, begin, go_on, joined, states, wait_for_durable, wait_for_return
from harness import Job, Result, check_clean, check_finite, read_logs, undisturbed

from ft_core.cli.ledger_check import verify

SCRIPT = Path(__file__).with_name("deepspeed_elastic_steps.py")
STEPS = 60
SAMPLES = ("--train-samples=100", "--dropout=0")
"""An epoch of them has fewer steps than a stride."""

CLIPPING = 0.2
"""Every step's gradients are clipped."""


@dataclass(frozen=True)
class Plain(Zero):
    """Data parallelism by the recipe that tells its state; `told` by a ledger, without fault tolerance."""

    policy: str = "shrink"
    more: tuple[str, ...] = SAMPLES
    told: str = ""
    owners: bool = False
    """Gradients are reduced to one rank each."""

    @property
    def script(self) -> Path:
        return SCRIPT

    def config(self) -> dict:
        config = super().config() | {"dataloader_drop_last": True, "gradient_clipping": CLIPPING}
        if self.owners:
            config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
        return config

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

    def config(self) -> dict:
        return super().config() | {"gradient_clipping": CLIPPING}

    def environment(self) -> dict[str, str]:
        return variables() | ({"FT_TOLD": self.told} if self.told else {})


Groups = Plain | Pipelines


ON_DEMAND = pytest.mark.exhaustive


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("groups", "nproc", "seed"),
    [
        pytest.param(Plain(0, gas=2), 1, 1, marks=ON_DEMAND),
        pytest.param(Pipelines(dp=3, gas=2), 2, 2, marks=ON_DEMAND),
        pytest.param(Pipelines(dp=3, zero=1, gas=2, bf16=True), 2, 6, marks=ON_DEMAND),
        pytest.param(Plain(1), 1, 3, marks=ON_DEMAND),
        (Plain(2, gas=2, bf16=True, more=(*SAMPLES, "--num-workers=2")), 1, 4),
        pytest.param(Plain(2, owners=True), 1, 5, marks=ON_DEMAND),
        pytest.param(Plain(3), 1, 6, marks=ON_DEMAND),
        (Plain(3, gas=2, bf16=True), 1, 7),
    ],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_groups_leave_and_return(groups: Groups, nproc: int, seed: int, tmp_path: Path) -> None:
    """One is lost and comes back, then another, at random moments; in the end as in a run that is told."""
    dice = random.Random(seed)
    job_dir = tmp_path / "job"
    with Job(job_dir, groups, STEPS, nproc=nproc, spares=0) as job:
        step = STRIDE
        go_on(job, step)
        job.wait_for_step(3, timeout=90)
        lost, then = dice.sample(range(groups.world), 2)
        time.sleep(dice.uniform(0.0, 0.5))
        job.kill_nodes(lost)
        epoch = job.wait_for_epoch("left", 2)["epoch"]
        go_on(job, step := step + STRIDE)
        job.join()
        epoch = wait_for_return(job, epoch)["epoch"]
        go_on(job, step := step + STRIDE)
        job.wait_for_step(step - STRIDE // 2)
        time.sleep(dice.uniform(0.0, 0.5))
        job.kill_nodes(then)
        epoch = job.wait_for_epoch("left", epoch + 1)["epoch"]
        go_on(job, step := step + STRIDE)
        job.join()
        job.wait_for_epoch("returned", epoch + 1, timeout=120)
        go_on(job, STEPS + 1)
        result = job.finish()
    check_clean(result)
    assert result.code == 0, result.output[-3000:]
    assert "could not rehearse" not in result.output
    check_told(result, groups)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "groups", [pytest.param(Plain(stage), marks=ON_DEMAND) for stage in (0, 1, 2)], ids=str
)
def test_a_job_grows_beyond_the_groups_that_it_started_with(groups: Plain, tmp_path: Path) -> None:
    """Two groups of three start; the third joins when there is a node for it."""
    job_dir = tmp_path / "job"
    ftrun = ("--nnodes=2:3", "--ft-policy=shrink")
    with Job(job_dir, groups, STEPS, spares=0, ftrun=ftrun) as job:
        begin(job)
        job.join()
        go_on(job, 2 * STRIDE)
        wait_for_return(job, 1)
        go_on(job, STEPS + 1)
        result = job.finish()
    check_clean(result)
    assert result.code == 0, result.output[-3000:]
    check_told(result, groups)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "groups",
    [pytest.param(Plain(0), marks=ON_DEMAND), Plain(2), pytest.param(Plain(3), marks=ON_DEMAND)],
    ids=str,
)
def test_checkpoints_are_whole_while_groups_are_away(groups: Plain, tmp_path: Path) -> None:
    """Also without the group that writes them; and a job that goes on from one trains what waited in it."""
    checkpoints = tmp_path / "checkpoints"
    jobs = [tmp_path / "first", tmp_path / "second"]
    save = (f"--save={checkpoints}", "--save-interval=1")
    with Job(jobs[0], groups, STEPS, spares=0, flags=save) as job:
        go_on(job, STRIDE)
        job.wait_for_step(STRIDE, timeout=90)
        job.kill_nodes(0)
        job.wait_for_epoch("left", 2)
        go_on(job, last := STRIDE + 2)
        job.until(
            lambda: set(states(read_logs(jobs[0])).get(last, ())) >= {1, 2}, f"step {last} of the others"
        )
    saved = int((checkpoints / "latest").read_text().removeprefix("step"))
    assert saved == last - 1  # a step waits for its limit before it is saved
    if groups.stage:  # what the first rank alone knows, for zero_to_fp32
        whole = min((checkpoints / f"step{saved}").glob("*mp_rank_00_model_states.pt"))
        assert torch.load(whole, weights_only=False)["shared_params"], "tied weights"
    with Job(jobs[1], groups, 2 * STRIDE, spares=0, flags=(f"--load={checkpoints}",)) as job:
        go_on(job, 2 * STRIDE + 1)
        result = job.finish()
    assert result.code == 0, result.output[-3000:]
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text(joined(jobs, saved))
    report = verify(ledger.read_text().splitlines())
    assert not report.problems
    assert report.steps == 2 * STRIDE
    reference = undisturbed(replace(groups, told=str(ledger)), 2 * STRIDE)
    expected, found = states(reference.output), states(read_logs(jobs[1]))
    assert found == {step: ranks for step, ranks in expected.items() if step > saved}
    assert result.digest == reference.digest


@pytest.mark.timeout(300)
@pytest.mark.parametrize("groups", [pytest.param(Plain(s), marks=ON_DEMAND) for s in (0, 1, 3)], ids=str)
def test_a_durable_checkpoint_while_a_group_is_away(groups: Plain, tmp_path: Path) -> None:
    """A new job goes on from it with all groups, and trains what waited in it."""
    durable = tmp_path / "durable"
    ftrun = (f"--ft-durable-dir={durable}", "--ft-durable-interval=4")
    jobs = [tmp_path / "first", tmp_path / "second"]
    saved = 2 * STRIDE
    with Job(jobs[0], groups, STEPS, spares=0, ftrun=ftrun) as job:
        begin(job)
        job.kill_nodes(1)
        job.wait_for_epoch("left", 2)
        go_on(job, saved)
        job.wait_for_step(saved - 1)
        wait_for_durable(durable, saved, groups.world)
    with Job(jobs[1], groups, STEPS, spares=0, ftrun=ftrun) as job:
        go_on(job, STEPS + 1)
        result = job.finish()
    assert result.code == 0, result.output[-3000:]
    assert result.of("decided")[0]["version"] == saved
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text(joined(jobs, saved))
    report = verify(ledger.read_text().splitlines())
    assert not report.problems
    assert report.steps == STEPS
    reference = undisturbed(replace(groups, told=str(ledger)), STEPS)
    expected, found = states(reference.output), states(read_logs(jobs[1]))
    assert set(found) >= set(range(saved + 1, STEPS + 1))
    assert found == {step: expected[step] for step in found}
    assert result.digest == reference.digest


def check_told(result: Result, groups: Groups) -> None:
    """Every sample once; all groups alike after every step; all as in a run that knew it beforehand."""
    assert result.job_dir is not None
    ledger = result.job_dir / "ledger.jsonl"
    report = verify(ledger.read_text().splitlines())
    assert not report.problems
    assert report.steps == STEPS
    reference = undisturbed(replace(groups, told=str(ledger)), STEPS)
    logs, steps = read_logs(result.job_dir), set(range(1, STEPS + 1))
    expected, found = states(reference.output), states(logs, result.events)
    undone = repeated(ledger)
    assert set(expected) == set(found) | undone == steps
    for step, ranks in found.items():
        for rank, digests in ranks.items():
            assert digests == expected[step][rank], f"role {rank} after step {step}"
    # What is undone, or has begun by then, is not told again.
    given = steps - undone - {step + 1 for step in undone}
    losses, right = own_losses(logs, given), own_losses(reference.output, given)
    assert {of: losses[of] for of in losses if of in right} == {of: right[of] for of in losses if of in right}
    assert any(len(ranks) < groups.world for ranks in found.values()), "no step was done without a group"
    if len(found[STEPS]) == groups.world:  # else others stand in for those that are away
        assert result.digest == reference.digest


def own_losses(text: str, steps: set[int]) -> dict[tuple[int, int], set[str]]:
    """(step, rank) -> the loss that the script was given, of those of the steps."""
    found: dict[tuple[int, int], set[str]] = {}
    for step, rank, loss in re.findall(r"^own (\d+) (\d+) (\S+)$", text, re.MULTILINE):
        if int(step) in steps:
            found.setdefault((int(step), int(rank)), set()).add(loss)
    check_finite(loss for losses in found.values() for loss in losses)
    return found


def repeated(ledger: Path) -> set[int]:
    """Steps that were done again by fewer groups: a script that told of one by then is not asked again."""
    found: set[int] = set()
    done = 0
    for record in map(json.loads, ledger.read_text().splitlines()):
        if "version" in record:
            found |= set(range((record["version"] or 0) + 1, done + 1))
        done = record.get("step", record.get("version")) or 0
    return found
