"""Where to go on in place does not help, some or all begin anew, from memory or storage: the job ends as if
nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_jobs import Zero
from failing_jobs import EVALUATING, TROUBLED, Failing
from failures import EVERY
from harness import Job, Layout, Result, Training, check_clean, different, reference

STEPS = 8
AT = "forward", 4
MEGATRON, DEEPSPEED, DEEPSPEED3 = Layout(1, 1, 2, distributed=True), Zero(1, dp=2), Zero(3, dp=2)
EVALUATING_MEGATRON = Layout(1, 1, 2, distributed=True, more=EVALUATING)
EVALUATING_DEEPSPEED = Zero(1, dp=2, more=EVALUATING[:1])
CLOCKED = Path(__file__).parent / "clocked.py"
BUG = "raise ValueError('no')"


def rungs(result: Result) -> list[str]:
    """Those that were climbed, one after the other."""
    return [event["rung"] for event in result.of("begins_anew")]


def check_ends_as_undisturbed(result: Result, training: Training) -> None:
    expected = reference(training, STEPS)
    assert result.code == 0, result.output[-4000:]
    assert different(result.losses) == expected.losses
    assert result.digest == expected.digest
    check_clean(result)


@pytest.mark.parametrize(
    ("failures", "ftrun", "climbed", "origins"),
    [
        (2, (), ["all"], ["memory", "memory"]),
        (3, (), ["all", "restart"], ["memory", "memory", "initial"]),
        (3, ("--ft-durable-interval=2",), ["all", "restart"], ["memory", "memory", "durable"]),
        (5, (), ["all", *3 * ["restart"]], ["memory", "memory", *3 * ["initial"]]),
    ],
    ids=["memory", "script", "durable", "often"],
)
@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED, DEEPSPEED3], ids=str)
def test_the_same_error_again_and_again(
    training: Training,
    failures: int,
    ftrun: tuple[str, ...],
    climbed: list[str],
    origins: list[str],
    tmp_path: Path,
) -> None:
    durable = (f"--ft-durable-dir={tmp_path}/durable",) * bool(ftrun)
    failing = Failing(training, failures * ((TROUBLED, *AT, BUG),))
    with Job(tmp_path / "job", failing, STEPS, spares=0, ftrun=(*ftrun, *durable)) as job:
        result = job.finish()
    assert rungs(result) == climbed, result.output[-3000:]
    assert [event["origin"] for event in result.of("decided")[1:]] == origins
    check_ends_as_undisturbed(result, training)


def test_so_often_and_no_more(tmp_path: Path) -> None:
    failing = Failing(MEGATRON, 4 * ((TROUBLED, *AT, BUG),))
    with Job(tmp_path / "job", failing, STEPS, spares=0, ftrun=("--max-restarts=1",)) as job:
        result = job.finish()
    assert result.code == 1 and rungs(result) == ["all", "restart"]
    assert "ftrun: the job stops: after 1 restart in a row without a new step: worker" in result.output
    check_clean(result)


IN_VAIN = {
    # Of a successor, wherever it is.
    "start": ((TROUBLED, *AT, "SIGSEGV"), *3 * ((TROUBLED, "startup", 0, "1 / 0"),)),
    # Nine workers, one after the other.
    "step": 9 * ((TROUBLED, *AT, "SIGSEGV"),),
}


@pytest.mark.parametrize("what", IN_VAIN)
@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED], ids=str)
def test_recoveries_in_vain(training: Training, what: str, tmp_path: Path) -> None:
    failing = Failing(training, IN_VAIN[what])
    with Job(tmp_path / "job", failing, STEPS, spares=0, ftrun=("--ft-strikes=0",)) as job:
        result = job.finish()
    assert rungs(result) == ["all"], result.output[-3000:]
    check_ends_as_undisturbed(result, training)


DEADLOCK = "import torch, torch.distributed as d; d.recv(torch.zeros(3), 1 - d.get_rank())"


@pytest.mark.parametrize("training", [MEGATRON, DEEPSPEED], ids=str)
def test_roles_that_wait_for_each_other(training: Training, tmp_path: Path) -> None:
    """As none ever has: nothing tells which of them is wrong, and nobody waits for ten minutes."""
    failing = Failing(training, ((EVERY, *AT, DEADLOCK),))
    with Job(tmp_path / "job", failing, STEPS, spares=0) as job:
        result = job.finish()
    (hang,) = result.of("hang")
    assert not hang["explained"] and rungs(result) == ["some"]
    check_ends_as_undisturbed(result, training)


ENDS = {
    "sys.exit(3)": (AT, "import sys; sys.exit(3)", "all"),
    "os._exit(0)": (AT, "import os; os._exit(0)", "all"),
    "leaves alone": (("evaluate", 2), "import sys; sys.exit(0)", "all"),
    "first start": (("startup", 0), "1 / 0", "restart"),
    "first line": (("begin", 0), "import os; os._exit(5)", "restart"),
    "diverges": (AT, "from ft_core.errors import ReplayMismatch; raise ReplayMismatch('no')", "all"),
    "at the end": (("end", STEPS), "1 / 0", "restart"),
}
"""Ways to end that a restart helps against: where, what is done there, and the rung that is climbed."""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("training", [EVALUATING_MEGATRON, EVALUATING_DEEPSPEED], ids=str)
def test_a_role_that_ends_once(training: Training, end: str, tmp_path: Path) -> None:
    (point, step), what, rung = ENDS[end]
    failing = Failing(training, ((TROUBLED, point, step, what),))
    with Job(tmp_path / "job", failing, STEPS, spares=0) as job:
        result = job.finish()
    assert rungs(result) == [rung] or point == "end", result.output[-3000:]
    check_ends_as_undisturbed(result, training)


@pytest.mark.parametrize("role", [0, 1])
def test_a_script_that_never_does_the_same_again(role: int, tmp_path: Path) -> None:
    """Whoever takes rank 0 over cannot pass over the steps before."""
    saves = f"--save={tmp_path}/checkpoints", "--save-interval=2", f"--load={tmp_path}/checkpoints"
    ftrun = ("--ft-inject", f"{role}@forward:5:worker")
    about = {"spares": 0, "ftrun": ftrun, "flags": saves, "script": CLOCKED}
    with Job(tmp_path / "job", DEEPSPEED, STEPS, **about) as job:
        result = job.finish()
    print(result.output, [event["event"] for event in result.events])
    check_ends_as_undisturbed(result, DEEPSPEED)
