"""Where not each version is protected: several finished steps are done again, to the bit."""

from __future__ import annotations

import pytest
from deepspeed_jobs import EnteredLoop
from harness import Job, Layout, check_drills, check_identical, check_survivors

ITERATIONS = 18
EVERYWHERE = (
    "3@startup:0:worker",
    "0@forward:2",
    "2@backward:4:worker",
    "0@gradients:6:worker",
    "3@optimizer:8",
    "0@gather:10:worker",
    "3@d2h:12",
    "0@h2h:15",
)
"""With three steps from a version to the next: in each of them, at each moment."""


@pytest.mark.parametrize("every", [2, 3, 8])
def test_megatron(every: int, tmp_path):
    layout = Layout(1, 2, 2, True, True)
    injected = [point for point in EVERYWHERE if every == 3 or "h2h" not in point]
    if every == 8:  # not a version is copied at that step
        injected.remove("3@d2h:12")
    ftrun = ("--respawn", f"--ft-every={every}", "--ft-inject", ",".join(injected))
    with Job(tmp_path / "job", layout, ITERATIONS, nproc=2, spares=3, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, layout, ITERATIONS)
    check_survivors(result, layout.world)
    check_drills(result, injected)


def test_a_loop_that_is_entered_again_with_deepspeed(tmp_path):
    injected = "1@forward:4:worker,0@optimizer:7:worker,1@between:10:worker"
    ftrun = ("--respawn", "--ft-every=3", "--ft-inject", injected)
    with Job(tmp_path / "job", EnteredLoop(3), ITERATIONS, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, EnteredLoop(3), ITERATIONS)
    check_survivors(result, EnteredLoop(3).world)
    assert result.recoveries == 3


def test_nobody_goes_back_to_before_a_checkpoint_of_the_scripts_own(tmp_path):
    """Who takes over begins with it."""
    training = EnteredLoop(2, checkpoints=str(tmp_path / "checkpoints"))
    ftrun = ("--respawn", "--ft-every=8", "--ft-inject", "0@forward:6:worker")
    with Job(tmp_path / "job", training, 9, ftrun=ftrun) as job:
        result = job.finish()
    assert [event["version"] for event in result.of("decided")] == [None, 5]
    check_identical(result, EnteredLoop(2), 9)
    check_survivors(result, training.world)
