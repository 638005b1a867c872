"""Unmodified DeepSpeed scripts lose nodes and workers at every moment of a step: they end bit-identically."""

from __future__ import annotations

import pytest
from deepspeed_jobs import TWICE, Pipeline, Zero
from harness import (
    Job,
    Training,
    check_drills,
    check_identical,
    check_random_kills,
    check_survivors,
)

ITERATIONS = 20
EVALUATED = ("--eval-interval=6",)
LOADERS = ("--num-workers=2",)
"""For DeepSpeed's own loader, in training and in evaluation."""


def moments(training: Training, nodes: int) -> dict[str, str]:
    """Moment -> where it is injected. Every second one, counted from `nodes` (0 or 1), takes a whole node."""
    first, last = 0, training.world - 1
    victims = {
        "startup": (last, 0),
        "recovery": (last, 0),  # the newcomer of the failure before: a failure during its recovery
        "forward": (first, 2),
        "backward": (last, 4),
        "gradients": (first, 6),
        "optimizer": (last, 8),
        "gather": (first, 10),
        "evaluate": (last, 12),
        "d2h": (first, 14),
        "between": (last, 16),
    }
    found = {
        point: f"{role}@{point}:{step}" + ":worker" * ((number + nodes) % 2)
        for number, (point, (role, step)) in enumerate(victims.items())
    }
    if isinstance(training, Zero) and training.stage:  # once the others know that one is lost in its gather
        found["derive"] = f"{last}@derive:10:worker"
    return found | {"h2h": f"{first}@h2h:18"}  # sending is the agent's


@pytest.mark.parametrize(
    ("training", "nproc", "nodes"),
    [
        pytest.param(Zero(0), 1, 0, marks=pytest.mark.exhaustive),
        pytest.param(Zero(1, gas=2), 1, 1, marks=pytest.mark.exhaustive),
        pytest.param(Zero(2, bf16=True), 1, 0, marks=pytest.mark.exhaustive),
        (Zero(3, gas=2, bf16=True, more=LOADERS), 1, 1),
        (Pipeline(more=LOADERS), 2, 1),
    ],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_every_moment(training: Training, nproc: int, nodes: int, tmp_path):
    injected = moments(training, nodes)
    ftrun = ("--respawn", "--ft-inject", ",".join(injected.values()))
    about = {"nproc": nproc, "spares": 3, "ftrun": ftrun, "flags": EVALUATED}
    with Job(tmp_path / "job", training, ITERATIONS, **about) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, *EVALUATED, again=TWICE * len(injected))
    check_survivors(result, training.world)
    check_drills(result, injected.values())


@pytest.mark.timeout(300)  # a minute, where the machine has nothing else to do
@pytest.mark.parametrize(
    ("training", "nproc", "seed"),
    [
        pytest.param(Zero(0), 1, 1, marks=pytest.mark.exhaustive),
        pytest.param(Zero(1), 1, 2, marks=pytest.mark.exhaustive),
        pytest.param(Zero(2, gas=2), 1, 3, marks=pytest.mark.exhaustive),
        pytest.param(Zero(3), 1, 4, marks=pytest.mark.exhaustive),
        pytest.param(Pipeline(), 2, 5, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_random_kills(training: Training, nproc: int, seed: int, tmp_path):
    check_random_kills(
        tmp_path / "job", training, nproc, seed, kills=6, kinds=("node", "worker", "worker"), again=TWICE
    )
