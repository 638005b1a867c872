"""Other kinds of state and other places to fail: fp16, optimizer instances, evaluation, failure domains."""

from __future__ import annotations

import pytest
from harness import Job, Layout, check_drills, check_identical, check_survivors

ITERATIONS = 10
OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")
EVALUATION = ("--eval-interval=3", "--eval-iters=2")
CASES = {
    "fp16": (
        Layout(1, 2, 2, True, more=("--fp16", "--initial-loss-scale=1048576")),
        (),
        "3@optimizer:3,0@backward:6",
        (),
    ),
    "instances": (
        Layout(1, 1, 4, True, True, ("--num-distributed-optimizer-instances=2",)),
        (),
        "3@gather:3,0@optimizer:6",
        (),
    ),
    "overlapped gradients": (
        Layout(1, 2, 2, True, True, ("--overlap-grad-reduce",)), (), "3@backward:3,0@gradients:6", (),
    ),
    "overlapped gradients, plain": (
        Layout(1, 2, 2, False, True, ("--overlap-grad-reduce",)), (), "3@backward:3,0@gradients:6", (),
    ),
    "overlapped gather": (
        Layout(1, 2, 2, True, True, OVERLAPPED), (), "3@forward:3,0@gather:5,2@optimizer:7", EVALUATION,
    ),
    "overlapped gather, fp32": (
        Layout(1, 1, 4, True, more=OVERLAPPED), (), "3@forward:3,0@gather:5,1@optimizer:7", (),
    ),
    "evaluation": (Layout(1, 2, 2, True), (), "3@evaluate:3,0@evaluate:6", EVALUATION),
    # Its shard of the first step is not copied yet: all go back to the beginning.
    "first step": (Layout(1, 1, 4, True), (), "3@d2h:1", ()),
    "crash": (Layout(2, 1, 2, True), (), "3@forward:3:worker,0@optimizer:6:worker", ()),
}  # fmt: skip


QUICK = {"overlapped gather, fp32", "evaluation", "first step", "crash"}
"""What neither test_moments.py nor the layouts of `pretrain()` have."""


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.exhaustive) for x in CASES]
)
def test_variant(name: str, tmp_path):
    layout, ftrun, injected, flags = CASES[name]
    ftrun = (*ftrun, "--respawn", "--ft-inject", injected)
    with Job(tmp_path / "job", layout, ITERATIONS, nproc=2, spares=1, ftrun=ftrun, flags=flags) as job:
        result = job.finish()
    check_identical(result, layout, ITERATIONS, *flags)
    check_survivors(result, layout.world)
    check_drills(result, injected.split(","))
    assert result.recoveries >= injected.count("@")
