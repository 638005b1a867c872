"""Nodes are taken out of whole jobs, between two steps: nothing is done again, and nobody fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from deepspeed_jobs import Zero
from harness import Job, Layout, Result, Training, check_identical

HERE = Path(__file__).parent
PACED = HERE / "paced.py"
STEPS, MORE = 40, 60
"""With `resting` there is more time at the end."""


def drain(job: Job, role: int) -> str:
    """The node that plays `role`; until it is out."""
    [node] = [row["node"] for row in job.status()["roles"] if row["role"] == role]
    assert node in job.ctl("drain", node)
    out = job.wait_for("drained", 1 + len([e for e in job.events() if e["event"] == "drained"]))
    assert out[-1]["node"] == node
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
