"""Errors of a script, and ends of its own making: tried once more where that may help, and never a hang."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from deepspeed_jobs import TWICE, Zero
from failing_jobs import Failing, little_memory
from failures import CASES, NODE, TABLE, Killed, Row, Script
from harness import Job, Layout, Training, check_clean, check_identical, check_survivors

from ft_core.cli import ask
from ft_core.protocol.messages import AskNodes, NodesStatus

STEPS = 8
MEGATRON, DEEPSPEED = Layout(1, 1, 2, distributed=True), Zero(2, dp=2)
AT = "1@forward:4"


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
@pytest.mark.parametrize(
    ("injected", "code", "said", "recoveries"),
    [
        pytest.param(
            *(f"{AT}:errors", 1, "the same again in the step after version 4", 1),
            marks=pytest.mark.exhaustive,
        ),
        (f"0@forward:4:errors,{AT}:errors", 1, "the same again in the step after version 4", 1),
        (f"{AT}:exit", 3, "exit code 3: sys.exit(3); the script wants it to end", 0),
        (f"{AT}:_exit", 5, "exit code 5; the script wants it to end", 0),
    ],
    ids=["twice", "twice-everywhere", "sys.exit", "os._exit"],
)
def test_what_ends_the_job(
    injected: str, code: int, said: str, recoveries: int, training: Training, tmp_path: Path
):
    with Job(tmp_path / "job", training, STEPS, spares=0, ftrun=("--ft-inject", injected)) as job:
        result = job.finish(90)
    assert result.code == code, result.output[-4000:]
    assert "ftrun: the job stops: worker" in result.output and said in result.output
    if recoveries:
        assert "RuntimeError: injected by --ft-inject" in result.output
    assert result.recoveries == recoveries
    check_clean(result)


ORDERED = next(error for error, case in CASES.items() if isinstance(case, Killed) and case.ordered)
OOM = next(error for error, case in CASES.items() if isinstance(case, Killed) and case.out_of_memory)
WAIT = "import failing; failing.wait_for_the_end()"
TROUBLED = 1
"""The role that it all happens to."""


def in_turn(rows: list[Row]) -> tuple[tuple[int, str, int, str], ...]:
    """Each in a step of its own, but what happens in start-up, to the worker that has just taken over."""
    found: list[tuple[int, str, int, str]] = []
    step = 0
    for row in rows:
        case = CASES.get(row.error)
        if isinstance(case, Script) and case.step < 0:
            found.append((TROUBLED, "startup", 0, row.error))
        else:
            step += 1
            found.append((TROUBLED, "forward", step, WAIT if case is None else row.error))
    return tuple(found)


def count(rows: list[Row]) -> int:
    """What counts against the node, by the table."""
    seen: Counter[str] = Counter()
    found = 0
    for row in rows:
        found += row.counts == "yes" or (row.counts == "from the second on" and seen[row.fault] > 0)
        seen[row.fault] += 1
    return found


@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED], ids=str)
def test_every_row_that_restarts(training: Training, tmp_path: Path):
    rows = sorted((row for row in TABLE if row.first == "restarts"), key=lambda row: row.error == NODE)
    with little_memory() as cgroup:
        if cgroup is None or not os.access("/dev/kmsg", os.R_OK):
            rows = [row for row in rows if row.error != OOM]
        failures = in_turn(rows)
        failing, steps = Failing(training, failures, cgroup), failures[-1][2] + 3
        with Job(tmp_path / "job", failing, steps, spares=0, ftrun=("--respawn",)) as job:
            for number, row in enumerate(rows):
                job.until((job.job_dir / f"failure-{number}").exists, f"{number}: {row.error}", 90)
                if row.error == ORDERED:
                    job.kill_worker(TROUBLED)
            known = ask.ask(AskNodes(), job.job_dir)
            job.kill_nodes(TROUBLED)
            result = job.finish()
    check_identical(result, training, steps, again=len(rows) * TWICE)
    check_survivors(result, training.world)
    check_clean(result)
    assert [(e["fault"], e["roles"]) for e in result.of("detected")] == [
        (row.fault, [TROUBLED]) for row in rows
    ]
    assert result.recoveries == len(rows)
    assert isinstance(known, NodesStatus)
    assert [len(node.strikes) for node in known.nodes] == [0, count(rows[:-1])]
