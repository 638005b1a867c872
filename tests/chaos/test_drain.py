"""Nodes are taken out of whole jobs, between two steps: nothing is done again, and nobody fails."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import nvml_library
import pytest
from deepspeed_jobs import Zero
from harness import Job, Layout, Result, Training, check_identical
from waiting import wait_for_value

HERE = Path(__file__).parent
PACED = HERE / "paced.py"
STEPS, MORE = 40, 60
"""With `resting` there is more time at the end."""


def drain(job: Job, role: int) -> str:
    """The node that plays `role`; until it is out."""
    node, out = playing(job, role), drained(job)
    assert node in job.ctl("drain", node)
    assert job.wait_for("drained", out + 1)[-1]["node"] == node
    return node


def drained(job: Job) -> int:
    """How many nodes are out by now."""
    return len([event for event in job.events() if event["event"] == "drained"])


def playing(job: Job, role: int) -> str:
    """The node that does."""
    [node] = [row["node"] for row in job.status()["roles"] if row["role"] == role]
    return node


def check_nobody_failed(result: Result) -> None:
    assert not result.of("detected") and not result.of("avoided") and not result.of("not_moving")
    assert result.of("moving") and len(result.of("drained")) == len(result.of("draining"))
    assert {step: len(lines) for step, lines in result.losses.items() if len(lines) > 1} == {}


def test_a_node_is_drained(tmp_path):
    layout = Layout(1, 1, 2, distributed=True)
    with Job(tmp_path / "job", layout, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        node = drain(job, 1)
        rows = job.status()["roles"]
        assert [row["node"] for row in rows] == ["node0", "node2"] and node == "node1"
        failures = {name: value for name, value in job.metrics().items() if "ft_failures_total" in name}
        assert not any(failures.values()), failures
        result = job.finish()
    check_identical(result, layout, STEPS)
    check_nobody_failed(result)


def announced(job: Job, notices: Path, role: int) -> str:
    """The node that plays `role`: its machine is about to go, as a file says; until it is out."""
    node, out = playing(job, role), drained(job)
    with notices.open("a") as file:
        file.write(f"{node} 90 a new power supply\n")
    assert job.wait_for("drained", out + 1)[-1]["node"] == node
    return node


def told(job: Job, _: Path, role: int) -> str:
    """The same, as it gets SIGTERM."""
    node, out = playing(job, role), drained(job)
    agent, _pid = job.pids(role)
    os.kill(agent, signal.SIGTERM)
    assert job.wait_for("drained", out + 1)[-1]["node"] == node
    return node


@pytest.mark.parametrize("how", [announced, told])
def test_a_node_that_is_about_to_go_is_drained(how, tmp_path):
    layout, notices = Layout(1, 1, 2, distributed=True), tmp_path / "notices"
    with Job(tmp_path / "job", layout, STEPS, script=PACED, ftrun=(f"--ft-notices=file:{notices}",)) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        node = how(job, notices, 1)
        rows = job.status()["roles"]
        assert [row["node"] for row in rows] == ["node0", "node2"] and node == "node1"
        result = job.finish()
    check_identical(result, layout, STEPS)
    check_nobody_failed(result)
    [begun] = result.of("draining")
    if how is announced:
        [notice] = result.of("notice")
        assert begun["reason"] == notice["reason"] == f"file {notices}: a new power supply"
        assert 60 < notice["seconds"] <= 90 and "the machine of node node1 goes in" in result.output
    else:
        assert begun["reason"] == "it was told to end (SIGTERM)" and result.of("leaving")


@nvml_library.needs_cc
def test_a_node_whose_memory_errors_grow_is_drained(tmp_path, monkeypatch):
    """By what NVML says of its GPU: before a worker fails."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    layout, state = Layout(1, 1, 2, distributed=True), tmp_path / "nvml"
    nvml_library.say(state, gpus=1, uncorrected0=7, pending0=1)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library.build(tmp_path / "lib")))
    monkeypatch.setenv("FAKE_NVML", str(state))
    with Job(tmp_path / "job", layout, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        agent, _pid = job.pids(1)
        asked = Path(f"{state}.{agent}.asked")
        wait_for_value(asked.exists, True)
        nvml_library.say(Path(f"{state}.{agent}"), gpus=1, uncorrected0=8, pending0=1)
        assert job.wait_for("drained")[-1]["node"] == "node1"
        assert [row["node"] for row in job.status()["roles"]] == ["node0", "node2"]
        result = job.finish()
    check_identical(result, layout, STEPS)
    check_nobody_failed(result)
    [found] = result.of("device")
    assert (found["finding"], found["action"], found["roles"]) == ("uncorrected memory errors", "drain", [1])
    assert (
        found["said"] == "7 before, 8 now" and "more uncorrected memory errors than before" in result.output
    )


def test_late_in_a_job_newcomers_pass_what_was_done_before_others_wait_for_them(tmp_path):
    """The record of early steps is a tensor: a newcomer that starts ahead of need has it as well."""
    training = Zero(1, dp=2, bf16=True)
    with Job(tmp_path / "job", training, MORE, nproc=1, script=HERE / "late_clm.py") as job:
        job.wait_for("joined", 3)
        job.wait_for_step(16)
        drain(job, 1)
        result = job.finish()
    check_identical(result, training, MORE)
    check_nobody_failed(result)
    lines = [
        json.loads(line) for line in (tmp_path / "job/logs/role-1/timeline.jsonl").read_text().splitlines()
    ]
    [moved] = [line for line in lines if line["epoch"] == 2]
    assert moved["passed_ahead"] >= 12, moved


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("training", "nproc", "script"),
    [
        (Layout(1, 2, 2, distributed=True, bf16=True), 2, HERE / "resting_core.py"),
        (Zero(2, dp=2, bf16=True), 1, HERE / "resting_clm.py"),
    ],
    ids=lambda value: str(value) if not isinstance(value, int | Path) else None,
)
def test_nodes_that_are_about_to_go_at_random_steps(training, nproc, script, seed, tmp_path):
    """One by a notice, another by SIGTERM: no step is done again."""
    rng, notices = random.Random(seed), tmp_path / "notices"
    flags = (f"--ft-notices=file:{notices}",)
    with Job(tmp_path / "job", training, MORE, nproc=nproc, spares=2, script=script, ftrun=flags) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 4)
        gone = set()
        for how in rng.sample((announced, told), 2):
            job.wait_for_step(job.step() + rng.randrange(1, 6))
            gone.add(how(job, notices, rng.randrange(training.world)))
        assert gone.isdisjoint(row["node"] for row in job.status()["roles"])
        result = job.finish()
    check_identical(result, training, MORE)
    check_nobody_failed(result)


@pytest.mark.timeout(300)  # half a minute, where the machine has nothing else to do
@pytest.mark.parametrize(
    ("training", "nproc", "script"),
    [
        (Layout(2, 1, 2, distributed=True), 2, HERE / "resting_core.py"),
        (Layout(1, 2, 2, distributed=True, bf16=True), 2, HERE / "resting_core.py"),
        (Zero(1, dp=2, bf16=True), 1, HERE / "resting_clm.py"),
        (Zero(3, dp=2), 1, HERE / "resting_clm.py"),
    ],
    ids=lambda value: str(value) if not isinstance(value, int | Path) else None,
)
def test_nodes_are_drained_one_after_the_other(training: Training, nproc: int, script: Path, tmp_path):
    """Role 0's too, whose node is where all meet; then a node is killed, and what the drained ones kept is
    not missed."""
    with Job(tmp_path / "job", training, MORE, nproc=nproc, spares=3, script=script) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 5)
        gone = {drain(job, training.world - 1), drain(job, 0)}
        assert gone.isdisjoint(row["node"] for row in job.status()["roles"])
        epoch = job.wait_for_epoch("resumed", 3)["epoch"]
        agent, _ = job.pids(0)
        os.killpg(agent, signal.SIGKILL)
        job.wait_for_epoch("resumed", epoch + 1)
        result = job.finish()
    check_identical(result, training, MORE, again=1)
    assert len(result.of("detected")) == 1 and len(result.of("moving")) == len(result.of("drained")) == 2
