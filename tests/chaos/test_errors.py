"""Errors of a script, and ends of its own making: tried once more where that may help, and never a hang."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deepspeed_jobs import TWICE, Zero
from failing_jobs import (
    ENDING,
    EVALUATING,
    LEAVING,
    WAIT,
    WHERE,
    Failing,
    check_it_ends_the_job,
    check_nobody_waits_for_who_leaves,
    every_row_that_restarts,
)
from failures import Row
from harness import Job, Layout, Training, check_clean, check_identical, check_survivors, environment

from ft_core.cli import ask

STEPS = 8
MEGATRON, DEEPSPEED = Layout(1, 1, 2, distributed=True), Zero(2, dp=2)
MEGATRON_EVALUATING = Layout(1, 1, 2, distributed=True, more=EVALUATING)
DEEPSPEED_EVALUATING = Zero(2, dp=2, more=EVALUATING[:1])
AT = "1@forward:4"
OWN_ERROR = Path(__file__).with_name("own_error")
PACED = OWN_ERROR.with_name("paced.py")


def test_an_exception_restarts_its_worker_from_memory(tmp_path: Path):
    training = MEGATRON
    ftrun = ("--ft-inject", f"{AT}:error")
    with Job(tmp_path / "job", training, STEPS, spares=0, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, training, STEPS, again=TWICE)
    check_survivors(result, training.world)
    check_clean(result)
    [failure] = result.of("detected")
    assert failure["roles"] == [1] and "injected by --ft-inject" in failure["reason"]
    assert result.recoveries == 1


@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED], ids=str)
def test_the_same_on_all_roles_ends_the_job(training: Training, tmp_path: Path) -> None:
    ftrun = ("--max-restarts=0", "--ft-inject", f"0@forward:4:errors,{AT}:errors")
    with Job(tmp_path / "job", training, STEPS, spares=0, ftrun=ftrun) as job:
        result = job.finish()
    assert result.code == 1, result.output[-4000:]
    assert "ftrun: the job stops: worker" in result.output
    assert "the same again in the step after version 4" in result.output
    assert "RuntimeError: injected by --ft-inject" in result.output
    assert result.recoveries == 1
    check_clean(result)


@pytest.mark.timeout(600)  # a minute, where the machine has nothing else to do
@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED], ids=str)
def test_every_row_that_restarts(training: Training, tmp_path: Path) -> None:
    result, steps, recoveries = every_row_that_restarts(training, tmp_path)
    check_identical(result, training, steps, again=recoveries * TWICE)


@dataclass(frozen=True)
class Armed(Layout):
    """A newcomer fails of an error of the engine's own, once there is the file `arm`."""

    arm: str = ""

    def environment(self) -> dict[str, str]:
        path = f"{OWN_ERROR}:{environment()['PYTHONPATH']}"
        return {"PYTHONPATH": path, "FT_TESTS_OWN_ERROR": self.arm}


def test_an_error_of_the_engines_own_costs_a_worker(tmp_path: Path):
    """Before the script's first line: not the script's, nor the node's."""
    arm, training = tmp_path / "arm", MEGATRON
    armed = Armed(1, 1, 2, distributed=True, arm=str(arm))
    with Job(tmp_path / "job", armed, STEPS, spares=0, script=PACED) as job:
        job.wait_for_epoch("resumed", 1)
        arm.touch()
        job.kill_worker(1)
        resumed = job.wait_for_epoch("resumed", 3)
        with ask.line(job.job_dir) as found:
            [known] = found.nodes("nodes")
        result = job.finish()
    check_identical(result, training, STEPS, again=2 * TWICE)
    check_clean(result)
    killed, own = result.of("detected")
    assert (killed["fault"], own["fault"], own["roles"]) == ("terminated", "engine", [1])
    assert "in which the script has no part: FileNotFoundError" in own["reason"]
    assert (resumed["epoch"], result.recoveries) == (3, 2)
    assert not any(node.strikes for node in known.nodes)


QUICKER = ["`KeyboardInterrupt`", "`sys.exit(3)`", "`os._exit(5)`"]
"""One job for each kind of end; others are of the same kind, or have jobs elsewhere."""


def also_exhaustive(long: bool, *values: object) -> Any:
    return pytest.param(*values, marks=() if long else pytest.mark.exhaustive)


@pytest.mark.parametrize("row", [also_exhaustive(row.error in QUICKER, row) for row in ENDING], ids=str)
@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED], ids=str)
def test_every_row_that_ends_the_job(row: Row, training: Training, tmp_path: Path) -> None:
    check_it_ends_the_job(row, training, tmp_path)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        also_exhaustive((how, where) == ("os._exit(0)", WHERE[0]), how, where)
        for how in LEAVING
        for where in WHERE
    ],
)
@pytest.mark.parametrize(
    "training",
    [MEGATRON_EVALUATING, pytest.param(DEEPSPEED_EVALUATING, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_nobody_waits_for_who_leaves(
    how: str, where: tuple[str, int], training: Training, tmp_path: Path
) -> None:
    check_nobody_waits_for_who_leaves(how, where, training, tmp_path)


def test_a_node_that_fails_often_is_avoided_until_it_is_forgiven(tmp_path: Path) -> None:
    """What `ftctl nodes` shows, after the controller was lost too, is what the job does."""
    crashes = [(1, "forward", step, "SIGSEGV") for step in (1, 2, 3)]
    failing = Failing(MEGATRON, (*crashes, (0, "forward", 4, WAIT)))
    ftrun = ("--ft-strikes=3/60", "--ft-hang-after=300")
    with Job(tmp_path / "job", failing, STEPS, spares=1, ftrun=ftrun) as job:
        job.until((job.job_dir / "failure-3").exists, "the last failure", 150)
        os.kill(job.status()["controller_pid"], signal.SIGKILL)
        job.wait_for("controller_restarted")
        job.until(lambda: job.status()["phase"] == "running", "a job that runs again")
        shown = job.ctl("nodes")
        assert re.search(r"^node1 .* 3/3  spare  avoided while there is another$", shown, re.M), shown
        assert len(re.findall("min ago: role 1.*: crashed$", shown, re.M)) == 3
        assert re.search(r"^node2 .* 0/3  1$", shown, re.M), shown
        rows = {row["node"]: row for row in json.loads(job.ctl("nodes", "--json"))["nodes"]}
        assert [rows[name]["avoided"] for name in sorted(rows)] == [False, True, False]
        assert "3" in job.ctl("nodes", "forgive", "node1")
        assert re.search(r"^node1 .* 0/3  spare$", job.ctl("nodes"), re.M)
        job.kill_nodes(1)
        result = job.finish()
    check_identical(result, MEGATRON, STEPS, again=4)
    assert (
        [event["node"] for event in result.of("avoided")]
        == ["node1"]
        == [event["node"] for event in result.of("forgiven")]
    )
    moved = [event["moved"] for event in result.of("decided") if event["epoch"] > 1]
    assert moved == [{"1": node} for node in ("node1", "node1", "node2", "node1")]
    check_clean(result)
