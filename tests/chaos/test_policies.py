"""What becomes of a job: restart in place, spare, wait, stop, durable checkpoint, or a clear error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import (
    RECIPE,
    ROOT,
    TINY,
    Job,
    Layout,
    Result,
    check_clean,
    check_identical,
    check_survivors,
    environment,
    read_logs,
    read_losses,
    reference,
)
from memory_of import memory_files
from waiting import wait_for_value

from ft_core.state.durable import complete, version_of

HERE = Path(__file__).parent
PACED = HERE / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
PLAIN = Layout(1, 1, 2)
NEVER_AGAIN = ("--max-restarts=0",)
STEPS = 40


def check_kept(result: Result) -> None:
    """What the script keeps of its own is what an undisturbed run would have (see paced.py)."""
    losses = [float(loss) for _, (loss,) in sorted(result.losses.items())]
    assert f"kept {[float(STEPS), sum(losses)]!r}\n" in result.output


def test_a_crashed_worker_is_restarted_where_it_was(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        before = job.status()
        for times in range(1, 4):
            job.kill_worker(1)
            job.wait_for("resumed", 1 + times)
        after = job.status()
        # Two snapshots, and a control block for the worker; another for the standby. Each is one mapping with
        # a descriptor of its own, and one more descriptor at the agent, for workers to open.
        agent, worker = job.pids(1)
        for pid, blocks, descriptors in ((agent, 2, 2), (worker, 1, 1)):
            about = (("ft-control", blocks), ("ft-snapshot", 2))
            held = {f"descriptor /memfd:{name}": count * descriptors for name, count in about}
            held |= {f"mapping /memfd:{name}": count for name, count in about}
            wait_for_value(lambda pid=pid: memory_files(pid), held)
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    assert [row["node"] for row in after["roles"]] == [row["node"] for row in before["roles"]]
    assert [s["node"] for s in after["spares"]] == [s["node"] for s in before["spares"]] == ["node2"]
    decided = result.of("decided")[-1]
    assert decided["roles"] == [1] and decided["origin"] == "memory"
    assert len(result.of("joined")) == 3


def test_without_a_spare_the_survivors_hold_until_a_node_joins(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=0, script=PACED) as job:
        job.wait_for("resumed")
        _, survivor = job.pids(0)
        job.kill_nodes(1)
        waiting = job.wait_for("waiting")[0]
        address = (job.job_dir / "controller").read_text().strip()
        assert waiting["roles"] == [1] and "node1" in waiting["reason"]
        assert f"ftrun --join {address} --job-dir {job.job_dir}" in waiting["reason"]
        assert job.status()["phase"] == "waiting"
        held = job.step()
        joined = job.join()
        job.wait_for("resumed", 2)
        assert job.pids(0)[1] == survivor
        result = job.finish()
        assert joined.wait(20) == 0
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    check_clean(result)
    assert result.of("decided")[-1]["version"] in (held - 1, held, held + 1)


def test_two_nodes_at_once_with_two_replicas(tmp_path):
    layout = Layout(1, 1, 3, distributed=True, more=("--global-batch-size=6",))
    with Job(tmp_path / "job", layout, STEPS, spares=2, script=PACED, ftrun=("--ft-replicas=2",)) as job:
        job.wait_for_step(4)
        job.kill_nodes(0, 1)
        result = job.finish()
    check_identical(result, layout, STEPS)
    check_survivors(result, layout.world)
    check_kept(result)
    assert {role for e in result.of("decided")[1:] for role in e["roles"]} == {0, 1}
    assert all(e["origin"] == "memory" for e in result.of("decided")[1:])


def test_the_only_node_is_lost_and_the_job_goes_on_on_the_spare(tmp_path):
    """The spare has kept copies, since there is no other failure domain."""
    with Job(tmp_path / "job", LAYOUT, STEPS, nproc=2, script=PACED) as job:
        job.wait_for("resumed")
        job.wait_for_step(5)
        copies = lambda: [set().union(*row["replicas"].values()) for row in job.status()["roles"]]  # noqa: E731
        wait_for_value(copies, [{"node1"}] * 2)
        job.kill_nodes(0)
        decided = job.wait_for_epoch("decided", 2)
        assert decided["origin"] == "memory" and set(decided["moved"].values()) == {"node1"}
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_clean(result)
    assert result.recoveries == 1


def test_policy_stop(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=0, script=PACED, ftrun=("--ft-policy=stop",)) as job:
        job.wait_for("resumed")
        job.kill_nodes(1)
        result = job.finish()
    assert result.code == 1
    assert "no worker for roles [1] (lost nodes: node1); policy is stop" in result.output
    assert result.of("stopped")
    check_clean(result)


def test_more_than_replicas_cover_falls_back_to_the_durable_checkpoint(tmp_path):
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}", "--ft-durable-interval=5")
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=2, script=PACED, ftrun=durable) as job:
        job.wait_for("durable", 2)
        job.kill_nodes(0, 1)
        result = job.finish()
    check_identical(result, LAYOUT, STEPS, again=STEPS)  # those since the checkpoint
    decided = result.of("decided")[-1]
    assert decided["origin"] == "durable" and decided["version"] >= 5


def test_more_than_replicas_cover_without_a_durable_checkpoint_is_a_clear_error(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=2, script=PACED, ftrun=NEVER_AGAIN) as job:
        job.wait_for("resumed")
        job.kill_nodes(0, 1)
        result = job.finish()
    assert result.code == 1
    for role in (0, 1):
        assert f"role {role}: segment {role}x1-" in result.output
        assert f"(the role ran on node{role})" in result.output
    assert "More failure domains were lost at once than --ft-replicas covers" in result.output
    check_clean(result)


@pytest.mark.parametrize(("layout", "damaged"), [(PLAIN, False), (LAYOUT, True)], ids=["plain", "damaged"])
def test_a_new_job_goes_on_from_the_durable_checkpoint_of_an_old_one(layout, damaged, tmp_path):
    """If the newest one turns out to be damaged, from the one before."""
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}", "--ft-durable-interval=5")
    with Job(tmp_path / "first", layout, STEPS, spares=0, script=PACED, ftrun=durable) as first:
        first.wait_for("durable", 3)
    if damaged:
        name = complete(str(tmp_path / "durable"), layout.world)[-1]
        newest, part = version_of(name), next((tmp_path / "durable" / name).glob("segments/1x1-*"))
        part.write_bytes(part.read_bytes()[:100])
    with Job(tmp_path / "second", layout, STEPS, spares=0, script=PACED, ftrun=durable) as job:
        result = job.finish()
    expected = reference(layout, STEPS)
    *_, began = decided = result.of("decided")
    assert [e["version"] for e in decided] == ([newest, newest - 5] if damaged else [began["version"]])
    assert began["origin"] == "durable" and began["version"] >= 5
    assert result.code == 0 and result.digest == expected.digest
    steps = range(decided[0]["version"] + 1, STEPS + 1)
    # The step that the checkpoint was made after may be logged again: its line travels with the state (and
    # where that checkpoint is given up for an older one, the steps between the two count as logged).
    assert {s: v for s, v in result.losses.items() if s in steps} == {s: expected.losses[s] for s in steps}
    assert min(result.losses) >= began["version"]


def test_an_exception_of_the_script_ends_the_job_with_its_traceback(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=HERE / "faulty.py", ftrun=NEVER_AGAIN) as job:
        result = job.finish()
    assert result.code == 1
    assert "ftrun: the job stops: worker" in result.output and "of role 1 on node1" in result.output
    assert "ZeroDivisionError: a bug of the user's" in result.output
    assert "the same again in the step after version 3" in result.output
    assert result.recoveries == 1
    check_clean(result)


def test_a_script_without_ft_trains_as_usual(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, protected=False) as job:
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)


def test_a_script_without_ft_ends_with_its_first_crash(tmp_path):
    about = {"protected": False, "script": PACED, "ftrun": NEVER_AGAIN}
    with Job(tmp_path / "job", LAYOUT, STEPS, **about) as job:
        job.wait_for_step(3)
        job.kill_worker(1)
        result = job.finish()
    assert result.code == 1
    why = "the job is not protected: --ft is not among Megatron's arguments"
    assert f"killed by SIGKILL; {why}" in result.output
    check_clean(result)


def test_torchs_own_data_parallelism_trains_as_usual_until_a_crash_ends_the_job(tmp_path):
    job_dir = tmp_path / "job"
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", "--nproc-per-node=2", *NEVER_AGAIN]
    command += [f"--job-dir={job_dir}", str(HERE / "accelerated.py")]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    why = "a model is wrapped in torch's DistributedDataParallel, whose steps cannot be done again"
    assert f"killed by SIGKILL; the job is not protected: {why}" in done.stderr
    assert done.stderr.count(f"this job is not protected: {why}; ") == 1
    assert set(read_losses(read_logs(job_dir))) == {1, 2, 3, 4}


def test_torchrun_with_ft_says_what_to_do():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [str(RECIPE), *TINY, "--train-iters=2", "--ft"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "ConfigError: --ft needs ftrun in place of torchrun" in done.stderr


@pytest.mark.parametrize("kinds", [("full", "lean"), ("lean", "full")], ids="-then-".join)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_checkpoint_serves_jobs_that_leave_out_other_things(bf16: bool, kinds: tuple[str, str], tmp_path):
    """Weights that follow from the optimizer's shards are in it or not, and in the job's own copies."""
    layout, place = Layout(1, 1, 2, distributed=True, bf16=bf16), tmp_path / "durable"
    durable = (f"--ft-durable-dir={place}", "--ft-durable-interval=5")
    flags = [(*durable, f"--ft-snapshot={kind}") for kind in kinds]
    with Job(tmp_path / "first", layout, STEPS, spares=0, script=PACED, ftrun=flags[0]) as first:
        first.wait_for("durable", 2)
    name = complete(str(place), layout.world)[-1]
    assert any((place / name).glob("segments/0x2-*")) == (kinds[0] == "full")
    inject = ("--ft-inject", f"1@gather:{STEPS - 4}:worker")
    with Job(tmp_path / "second", layout, STEPS, spares=0, script=PACED, ftrun=(*flags[1], *inject)) as job:
        result = job.finish()
    expected = reference(layout, STEPS)
    assert [e["origin"] for e in result.of("decided")] == ["durable", "memory"]
    assert result.code == 0 and result.digest == expected.digest
