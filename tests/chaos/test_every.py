"""Where not each version is protected: several finished steps are done again, to the bit."""

from __future__ import annotations

import pytest
from deepspeed_jobs import TWICE, Accelerated, Habits, HuggingFace, OwnLoop, Quirks, Zero
from harness import Job, Layout, Training, check_clean, check_drills, check_identical, check_survivors

ITERATIONS = 18
EVERYWHERE = (
    "3@startup:0:worker",
    "0@forward:2",
    "3@backward:4:worker",
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


@pytest.mark.parametrize(
    ("training", "injected"),
    [
        pytest.param(Zero(2, fp16=True), "1@optimizer:3,0@forward:7:worker,2@between:14:worker"),
        pytest.param(
            OwnLoop(3), "1@backward:3,2@between:6:worker,0@forward:10:worker", marks=pytest.mark.long
        ),
        pytest.param(Habits(1), "0@forward:12:worker,1@between:13:worker"),
        pytest.param(Quirks(), "0@forward:5:worker,1@d2h:9:worker"),
        pytest.param(
            Accelerated(2), "0@forward:5:worker,1@save:6:worker,0@between:9:worker", marks=pytest.mark.long
        ),
        pytest.param(HuggingFace(2), "0@backward:4,1@between:8:worker"),
    ],
    ids=str,
)
def test_deepspeed(training: Training, injected: str, tmp_path):
    ftrun = ("--respawn", "--ft-every=3", "--ft-inject", injected)
    with Job(tmp_path / "job", training, 14, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, training, 14, again=5 * TWICE * injected.count("@"))
    check_survivors(result, training.world)
    check_clean(result)
    assert result.recoveries == injected.count("@")
