"""The recipe for Slurm, as it is, on a real one: what Slurm does to a job, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.jobs import Loop
from cluster.nodes import SHARED
from harness import different, read_digest, read_losses, reference
from slurm import RECIPE, WORK, Run, Slurm, needed

pytestmark = needed

ITERATIONS = 60
LOOP = Loop()


SAVES = """
import os, pathlib, signal, sys, time
place, told = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: (told or print("told", flush=True), told.append(1)))
if (place / "saved").exists():
    print("resumed", flush=True)
    sys.exit()
(place / f"ready-{os.environ['RANK']}").touch()
while not told and not (place / "told").exists():  # as Megatron's ranks tell each other
    time.sleep(0.02)
(place / "told").touch()
time.sleep(3)
(place / "saved").touch()
"""
"""A script that handles SIGTERM as Megatron does with `--exit-signal-handler`, and takes its time for it."""


def submit(slurm: Slurm, *flags: str, **variables: str) -> int:
    """A job of the recipe, whose last steps take their time until `let_end`."""
    about = {"SCRIPT": str(LOOP.script), "FT_TESTS_AWAITED": str(SHARED / "awaited")} | variables
    return slurm.submit(*flags, RECIPE, *LOOP.arguments(ITERATIONS, protected=True), **about)


def let_end(slurm: Slurm) -> None:
    (slurm.work.parent / "awaited").touch()


def check_same(*runs: Run) -> None:
    """All together they printed what an undisturbed run does; after a loss a step may be printed again."""
    expected = reference(LOOP, ITERATIONS)
    text = "\n".join(run.output() for run in runs)
    assert different(read_losses(text)) == expected.losses
    assert read_digest(text) == expected.digest


def test_a_node_is_drained_and_another_one_lost(tmp_path: Path) -> None:
    """The roles of the node that Slurm wants back move to a spare between two steps; the node that is lost is
    replaced by the other one, and Slurm keeps the job."""
    with Slurm(tmp_path, 4) as slurm:
        job = submit(slurm, "--nodes=4", NNODES="2")
        run = Run(slurm, f"runs/slurm-{job}-0")
        run.until_step(3)
        slurm.command("scontrol", "update", "nodename=node1", "state=drain", "reason=broken")
        slurm.until(lambda: slurm.states()["node1"] == "DRAINING", "a node that is drained")
        slurm.until(lambda: run.events("drained"), "a node without a role")
        [notice] = run.events("notice")
        assert notice["reason"].endswith("DRAIN: broken") and notice["roles"] == [0]
        assert [event["roles"] for event in run.events("moving")] == [[0]]
        slurm.nodes[1].end()
        slurm.until(lambda: len(run.events("resumed")) == 3, "recovery")
        let_end(slurm)
        about = slurm.ended(job)
        assert (about["JobState"], about["ExitCode"]) == ("COMPLETED", "0:0")
        assert [event["roles"] for event in run.events("detected")] == [[1]]
        slurm.until(lambda: slurm.states()["node1"] == "DRAINED", "a node without a job")
        check_same(run)


def test_a_node_that_the_job_avoids_is_drained_in_slurm(tmp_path: Path) -> None:
    """By the recipe for `--ft-on`; what Slurm says of the node then drains it of this job, too."""
    with Slurm(tmp_path, 3) as slurm:
        flags = "--ft-strikes 1/60 --ft-on avoided=recipes/hooks/slurm_drain.sh"
        job = submit(slurm, FT_FLAGS=f"{flags} --ft-inject 1@optimizer:3:worker")
        run = Run(slurm, f"runs/slurm-{job}-0")
        slurm.until(lambda: run.events("avoided"), "a node that is avoided")
        slurm.until(lambda: slurm.states()["node2"] == "DRAINING", "a node that is drained")
        [avoided] = run.events("avoided")
        assert f"Reason=ft: {avoided['reason'][:100]}" in slurm.command("scontrol", "show", "node", "node2")
        slurm.until(lambda: run.events("notice"), "a notice of that")
        let_end(slurm)
        about = slurm.ended(job)
        assert (about["JobState"], about["ExitCode"]) == ("COMPLETED", "0:0")
        assert slurm.states()["node2"] == "DRAINED" and slurm.states()["node1"] == "IDLE"
        check_same(run)


@pytest.mark.exhaustive
def test_slurm_does_not_know_yet_that_a_node_is_lost(tmp_path: Path) -> None:
    """The job has long gone on, and ends: the other nodes are free, though srun waits for the lost one."""
    with Slurm(tmp_path, 3, lost_after=300) as slurm:
        job = submit(slurm)
        run = Run(slurm, f"runs/slurm-{job}-0")
        run.until_step(3)
        slurm.nodes[1].kill()
        slurm.until(lambda: len(run.events("resumed")) == 2, "recovery")
        let_end(slurm)
        slurm.until(lambda: slurm.states()["node1"] == slurm.states()["node3"] == "IDLE", "free nodes")
        about = slurm.about(job)
        assert (about["JobState"], about["ExitCode"]) == ("COMPLETING", "0:0")  # on the node that is lost
        check_same(run)


@pytest.mark.exhaustive
def test_the_first_node_is_lost(tmp_path: Path) -> None:
    """Batch script, srun and controller go with it: the job begins again from its durable checkpoint."""
    with Slurm(tmp_path, 4, kill_wait=5) as slurm:
        durable = f"--ft-durable-dir {SHARED}/durable --ft-durable-interval 10"
        job = submit(slurm, FT_FLAGS=durable)
        first, second = (Run(slurm, f"runs/slurm-{job}-{count}") for count in range(2))
        first.until_step(25)
        slurm.nodes[0].kill()
        let_end(slurm)
        about = slurm.ended(job, 150)
        assert (about["JobState"], about["ExitCode"], about["Restarts"]) == ("COMPLETED", "0:0", "1")
        assert min(read_losses(second.output())) > 10
        check_same(first, second)
        assert f"gpt, job {job}: begins again (1)" in slurm.log(job)


def saving(slurm: Slurm, *flags: str, **variables: str) -> tuple[int, Run, Run]:
    """A job of the script that saves, both of whose workers are there; its first run, and the next."""
    place = slurm.work / "place"
    place.mkdir()
    (slurm.work / "train.py").write_text(SAVES)
    # In a place of its own, which is the same each time.
    about = {"SCRIPT": str(WORK / "train.py"), "JOB_DIR": str(WORK / "job")} | variables
    job = slurm.submit(*flags, RECIPE, str(WORK / "place"), **about)
    slurm.until(lambda: len([*place.glob("ready-*")]) == 2, "workers")
    return job, Run(slurm, "job"), Run(slurm, "job-1")


def test_a_job_that_is_preempted_saves_and_goes_on(tmp_path: Path) -> None:
    """SIGTERM reaches all processes, some of them several times, and they have KillWait to save; then the job
    is in the queue again, and nothing of its first run is in its way."""
    with Slurm(tmp_path, 3) as slurm:
        job, first, second = saving(slurm)
        other = slurm.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true")
        slurm.ended(other)
        assert (slurm.work / "place" / "saved").exists()
        about = slurm.ended(job)
        assert (about["JobState"], about["ExitCode"], about["Restarts"]) == ("COMPLETED", "0:0", "1")
        assert first.output().split() == ["told"] * 2 and second.output().split() == ["resumed"] * 2


def test_time_is_nearly_up(tmp_path: Path) -> None:
    """One worker is told, the script saves and ends, and the job goes back into the queue."""
    with Slurm(tmp_path, 3) as slurm:
        job, first, _ = saving(slurm, "--time=1")  # less than what --signal has for saving: it comes at once
        slurm.until(lambda: slurm.about(job)["Restarts"] == "1", "restart")
        assert (slurm.work / "place" / "saved").exists()
        assert first.output().split() == ["told"]
        assert "asking the training to save and end" in slurm.log(job)


@pytest.mark.exhaustive
def test_an_array_on_the_same_nodes(tmp_path: Path) -> None:
    """Two jobs at once with one environment: ports, directories and ids are each one's own."""
    with Slurm(tmp_path, 3) as slurm:
        array = submit(slurm, "--array=0-1", "--oversubscribe", JOB_DIR=str(WORK / "job"))
        runs = [Run(slurm, f"job-{index}") for index in range(2)]
        for run in runs:
            run.until_step(3)
        let_end(slurm)
        for index, run in enumerate(runs):
            about = slurm.ended(f"{array}_{index}")
            assert (about["JobState"], about["ExitCode"], about["NodeList"]) == (
                "COMPLETED",
                "0:0",
                "node[1-3]",
            )
            check_same(run)
