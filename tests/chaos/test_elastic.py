"""Replica groups leave and come back while the others train on (policy `shrink`): nothing else changes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chaos.elastic_told import told
from elastic_jobs import (
    STRIDE,
    begin,
    go_on,
    joined,
    lasting_losses,
    states,
    wait_for_durable,
    wait_for_return,
)
from harness import Job, Layout, Result, check_clean, read_logs, undisturbed

from ft_core.elastic.rules import Membership

STEPS = 60
TWELVE = ("--global-batch-size=12",)
LOSS = r"iteration (\d+)/\d+ \| loss (\S+)"


@dataclass(frozen=True)
class Groups(Layout):
    """The recipe that tells its state, or of that the `parameters` alone; `told` by a ledger, if it is not
    given fault tolerance. What an optimizer `keeps`, nobody can adopt."""

    told: str = ""
    keeps: bool = False
    parameters: bool = False

    @property
    def script(self) -> Path:
        return Path(__file__).with_name("elastic_steps.py")

    def environment(self) -> dict[str, str]:
        flags = {"FT_TOLD": self.told, "FT_KEEPS": self.keeps, "FT_PARAMETERS": self.parameters}
        return {name: str(value) for name, value in flags.items() if value}


@pytest.mark.parametrize(
    ("layout", "seed"),
    [
        (Groups(1, 1, 3, more=TWELVE), 1),
        pytest.param(Groups(1, 2, 3, bf16=True, more=TWELVE), 2, marks=pytest.mark.exhaustive),
        # One optimizer over all groups: others adopt the shards of the one that is lost.
        (Groups(1, 1, 3, True, bf16=True, more=TWELVE), 4),
        # Three instances of two: of a lost instance, the ranks that are left go to another.
        pytest.param(
            Groups(1, 1, 6, True, more=("--num-distributed-optimizer-instances=3", "--global-batch-size=24")),
            3,
            marks=pytest.mark.exhaustive,
        ),
        # Two instances: one of them trains alone.
        pytest.param(
            Groups(1, 1, 4, True, more=("--num-distributed-optimizer-instances=2", "--global-batch-size=16")),
            12,
            marks=pytest.mark.exhaustive,
        ),
        *(
            pytest.param(
                Groups(tp, pp, 3, True, bf16, ("--global-batch-size=12", *more)),
                seed,
                marks=pytest.mark.exhaustive,
            )
            for tp, pp, bf16, more, seed in (
                (1, 2, True, (), 5),
                (2, 1, True, (), 10),
                (1, 1, False, (), 6),
                (1, 1, False, ("--fp16",), 9),
                (1, 1, True, ("--overlap-grad-reduce", "--overlap-param-gather"), 7),
                (1, 1, False, ("--overlap-grad-reduce", "--overlap-param-gather"), 8),
            )
        ),
    ],
    ids=str,
)
def test_groups_leave_and_return(layout: Groups, seed: int, tmp_path: Path) -> None:
    """One is lost, comes back, and another is lost, at random moments; then as in a run that is told."""
    dice = random.Random(seed)
    job_dir = tmp_path / "job"
    with Job(job_dir, layout, STEPS, spares=0, ftrun=("--ft-policy=shrink", "--respawn")) as job:
        epoch, step = 1, STRIDE
        go_on(job, step)
        job.wait_for_step(3, timeout=90)
        for role in dice.sample(range(layout.world), 2):
            time.sleep(dice.uniform(0.0, 0.5))
            job.kill_nodes(role)
            epoch = job.wait_for_epoch("left", epoch + 1)["epoch"]
            step += STRIDE
            go_on(job, step)
            epoch = wait_for_return(job, epoch)["epoch"]
            step += STRIDE
            go_on(job, step)
            job.wait_for_step(step - STRIDE // 2)
        go_on(job, STEPS + 1)
        result = job.finish()
    check_clean(result)
    assert result.code == 0, result.output[-3000:]
    check_told(result, layout)


def check_told(result: Result, layout: Groups) -> None:
    """Every sample once; all groups alike after every step; all as in a run that knew it all beforehand."""
    assert result.job_dir is not None
    ledger = result.job_dir / "ledger.jsonl"
    reference = undisturbed(Groups(layout.tp, layout.pp, layout.dp, layout.distributed, layout.bf16,
                                layout.more, str(ledger)), STEPS)  # fmt: skip
    assert lasting_losses(read_logs(result.job_dir), result.events, LOSS) == reference.losses
    assert sorted(reference.losses) == list(range(1, STEPS + 1))
    expected, found = states(reference.output), states(read_logs(result.job_dir), result.events)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step, ranks in found.items():
        for rank, digests in ranks.items():
            assert digests == expected[step][rank], f"role {rank} after step {step}"
    assert any(len(ranks) < layout.world for ranks in found.values()), "no step was done without a group"
    assert "could not rehearse" not in result.output
    assert result.digest == reference.digest


def test_two_groups_that_lost_a_node_each_make_a_whole_one(tmp_path: Path) -> None:
    """Then the controller dies, and its successor takes the other group back."""
    layout = Groups(1, 2, 2)
    job_dir = tmp_path / "job"
    with Job(job_dir, layout, STEPS, spares=0, ftrun=("--ft-policy=shrink", "--respawn")) as job:
        begin(job)
        job.kill_nodes(0, 3)  # of the first stage in one group, of the second in the other
        left = job.wait_for_epoch("left", 2)
        assert left["roles"] == [1, 3]
        os.kill(job.status()["controller_pid"], signal.SIGKILL)
        go_on(job, 2 * STRIDE)
        assert wait_for_return(job, left["epoch"])["roles"] == [1, 3]
        go_on(job, STEPS + 1)
        result = job.finish()
        job.ctl("data", "verify")
    check_clean(result)
    assert result.code == 0, result.output[-3000:]
    check_told(result, layout)


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        pytest.param(Groups(1, 1, 3, more=TWELVE), 2, marks=pytest.mark.exhaustive),
        (Groups(1, 1, 3, True, bf16=True, more=TWELVE), 2),
        pytest.param(Groups(1, 2, 3, bf16=True, more=TWELVE), 4, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_job_grows_beyond_the_groups_that_it_started_with(
    layout: Groups, nodes: int, tmp_path: Path
) -> None:
    """Two groups of three start; the third joins when there are nodes for it."""
    job_dir = tmp_path / "job"
    ftrun = (f"--nnodes={nodes}:{layout.world}", "--ft-policy=shrink")
    with Job(job_dir, layout, STEPS, spares=0, ftrun=ftrun) as job:
        begin(job)
        for _ in range(layout.world - nodes):
            job.join()
        go_on(job, 2 * STRIDE)
        wait_for_return(job, 1)
        go_on(job, STEPS + 1)
        result = job.finish()
        job.ctl("data", "verify")
    check_clean(result)
    assert result.code == 0, result.output[-3000:]
    check_told(result, layout)


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        pytest.param(Groups(1, 1, 3, more=TWELVE), 3, marks=pytest.mark.exhaustive),
        (Groups(1, 1, 3, True, bf16=True, more=TWELVE), 3),
        pytest.param(Groups(1, 2, 3, True, bf16=True, more=TWELVE), 6, marks=pytest.mark.exhaustive),
        pytest.param(Groups(1, 1, 3, more=TWELVE), 2, marks=pytest.mark.exhaustive),
        pytest.param(Groups(1, 1, 3, True, more=TWELVE), 2, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_durable_checkpoint_while_a_group_is_away(layout: Groups, nodes: int, tmp_path: Path) -> None:
    """It is whole: a new job, of so many nodes, goes on from it, and trains what was left untrained."""
    durable = tmp_path / "durable"
    ftrun = ("--ft-policy=shrink", f"--ft-durable-dir={durable}", "--ft-durable-interval=4")
    saved = 2 * STRIDE
    with Job(tmp_path / "first", layout, STEPS, spares=0, ftrun=ftrun) as job:
        begin(job)
        job.kill_nodes(1)
        job.wait_for_epoch("left", 2)
        go_on(job, saved)
        wait_for_durable(durable, saved, layout.world)
        first, events = read_logs(job.job_dir), job.events()
    started = (*ftrun, f"--nnodes={nodes}:{layout.world}")
    with Job(tmp_path / "second", layout, STEPS, spares=0, ftrun=started) as job:
        go_on(job, STEPS + 1)
        result = job.finish()
    assert result.code == 0, result.output[-3000:]
    began = result.of("decided")[0]
    assert (began["origin"], began["version"]) == ("durable", saved)

    ledger = one_ledger(tmp_path, saved, range(layout.dp * nodes // layout.world))
    samples = [at for dealt in told(ledger).values() for group in dealt.values() for at in group]
    assert sorted(samples) == list(range(len(samples))), "a sample is missing, or was trained twice"
    reference = undisturbed(replace(layout, told=str(ledger)), STEPS)
    second, after = read_logs(tmp_path / "second"), range(saved + 1, STEPS + 1)
    losses = lasting_losses(first, events, LOSS) | lasting_losses(second, (), LOSS)
    assert losses == reference.losses
    expected, found = states(reference.output), states(first, events) | states(second)
    assert any(len(found[step]) < layout.world for step in range(1, saved + 1))
    assert all(len(found[step]) == nodes for step in after)
    for step, ranks in found.items():
        for rank, digests in ranks.items():
            assert digests == expected[step][rank], f"role {rank} after step {step}"
    if nodes == layout.world:  # else others stand in for those that are away
        assert result.digest == reference.digest


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharded", [False, True])
def test_the_others_are_lost_while_a_group_is_away(sharded: bool, tmp_path: Path) -> None:
    """With a node for one it goes on, from the durable checkpoint made without the group; all come back."""
    layout = Groups(1, 1, 3, sharded, more=TWELVE)
    durable, job_dir = tmp_path / "durable", tmp_path / "job"
    ftrun = ("--ft-policy=shrink", f"--ft-durable-dir={durable}", "--ft-durable-interval=4")
    with Job(job_dir, layout, STEPS, spares=0, ftrun=ftrun) as job:
        begin(job)
        job.kill_nodes(1)
        left = job.wait_for_epoch("left", 2)
        go_on(job, 2 * STRIDE)
        wait_for_durable(durable, 2 * STRIDE, layout.world)
        job.kill_nodes(0, 2)
        job.wait_for_epoch("waiting", left["epoch"] + 1)
        job.join()
        again = job.wait_for_epoch("state_restored", left["epoch"] + 1, timeout=90)
        for limit in (3 * STRIDE, 4 * STRIDE):
            epoch = job.events()[-1]["epoch"]
            go_on(job, limit)
            job.join()
            wait_for_return(job, epoch)
        go_on(job, STEPS + 1)
        result = job.finish()
    assert again["version"] == 2 * STRIDE
    assert [e["origin"] for e in result.of("decided") if e["epoch"] == again["epoch"]] == ["durable"]
    assert result.code == 0, result.output[-3000:]
    check_told(result, layout)


def one_ledger(directory: Path, version: int, groups: range) -> Path:
    """Of the job `first`, up to `version`, and of `second`, which went on from there with these groups."""
    lines = (directory / "first" / "ledger.jsonl").read_text().splitlines()
    epoch = [about for line in lines if "membership" in (about := json.loads(line))][-1]
    membership = Membership.from_json(epoch["membership"])
    epoch["membership"] = membership.changed(version, groups).to_json()
    path = directory / "ledger.jsonl"
    both = joined([directory / "first", directory / "second"], version)
    path.write_text(both + json.dumps({**epoch, "version": STEPS}) + "\n")
    return path


def test_a_sharded_state_that_nobody_can_adopt_is_waited_for(tmp_path: Path) -> None:
    """Its group cannot leave, and the reason is given."""
    layout = Groups(1, 1, 2, distributed=True, keeps=True)
    job_dir = tmp_path / "job"
    with Job(job_dir, layout, STEPS, spares=0, ftrun=("--ft-policy=shrink", "--respawn")) as job:
        begin(job)
        job.kill_nodes(1)
        assert "share one sharded state" in job.wait_for("waiting")[0]["reason"]
        go_on(job, STEPS + 1)
        result = job.finish()
    assert result.code == 0, result.output[-3000:]
    assert not result.of("left")
    reference = undisturbed(layout, STEPS)
    assert (result.losses, result.digest) == (reference.losses, reference.digest)


def test_a_group_that_keeps_the_others_waiting_comes_back_later(tmp_path: Path) -> None:
    layout = Groups(1, 1, 2)
    job_dir = tmp_path / "job"
    ftrun = ("--ft-policy=shrink", "--respawn", "--ft-return-limit=2")
    with Job(job_dir, layout, STEPS, spares=0, ftrun=ftrun) as job:
        begin(job)
        job.kill_nodes(1)
        left = job.wait_for_epoch("left", 2)
        (job_dir / "slow").touch()
        go_on(job, 2 * STRIDE)
        late = job.wait_for_epoch("not_returning", left["epoch"] + 1)
        assert "did not have their state" in late["reason"] and late["roles"] == [1]
        (job_dir / "slow").unlink()
        job.wait_for_epoch("resumed", late["epoch"])
        go_on(job, 3 * STRIDE)
        wait_for_return(job, late["epoch"])
        go_on(job, STEPS + 1)
        result = job.finish()
    assert result.code == 0, result.output[-3000:]
    check_told(result, layout)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sharded", [False, True])
def test_fifty_leave_and_return(sharded: bool, tmp_path: Path) -> None:
    """Eight groups: no hang, no divergence, and nothing is left behind, neither descriptors nor processes."""
    groups, rounds = 8, 50
    more = (f"--global-batch-size={2 * groups}", "--num-layers=1")
    layout = Groups(1, 1, groups, sharded, more=more, parameters=sharded)
    dice = random.Random(50)
    job_dir = tmp_path / "job"
    held: list[int] = []
    with Job(job_dir, layout, 100_000, spares=0, ftrun=("--ft-policy=shrink", "--respawn")) as job:
        step, epoch = STRIDE, 1
        go_on(job, step)
        job.wait_for_epoch("resumed", 1, timeout=180)
        for _ in range(rounds):
            time.sleep(dice.uniform(0.0, 0.3))
            job.kill_nodes(dice.randrange(groups))
            epoch = job.wait_for_epoch("left", epoch + 1)["epoch"]
            step = max(step, job.step()) + 4
            go_on(job, step)
            epoch = wait_for_return(job, epoch)["epoch"]
            step += 4
            go_on(job, step)
            job.wait_for_epoch("resumed", epoch)
            held.append(job_holds(job))
        job.ctl("data", "verify")
        events = job.events()
    found = states(read_logs(job_dir), events)
    assert all(len(set.union(*ranks.values())) == 1 for ranks in found.values()), "groups differ"
    assert max(held[-10:]) <= max(held[5:15]) + groups, held


def job_holds(job: Job) -> int:
    """Open descriptors (sockets, memory) and threads of all processes of a job, and these themselves."""
    status = job.status()
    agents = {row["agent_pid"] for row in status["roles"]}
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            group = int((path / "stat").read_text().rpartition(")")[2].split()[2])
            if group in agents or int(path.name) == status["controller_pid"]:
                total += 1 + len(list((path / "fd").iterdir())) + len(list((path / "task").iterdir()))
        except OSError:
            continue
    return total
