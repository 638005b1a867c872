"""Unmodified DeepSpeed scripts lose nodes and workers at every moment of a step: they end bit-identically."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from deepspeed_jobs import Pipeline, Zero
from harness import Job, Training, check_clean, check_identical, check_survivors

ITERATIONS = 20
KILLS = 6
STEPS = 10
"""A kill comes after so many steps at the latest, so that all of them fit in on a machine of any speed."""

EVALUATED = ("--eval-interval=6",)


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
    return found | {"h2h": f"{first}@h2h:18"}  # sending is the agent's


@pytest.mark.parametrize(
    ("training", "nproc", "nodes"),
    [
        (Zero(0), 1, 0),
        (Zero(1, gas=2), 1, 1),
        (Zero(2, bf16=True), 1, 0),
        (Zero(3, gas=2, bf16=True), 1, 1),
        (Pipeline(), 2, 1),
    ],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_every_moment(training: Training, nproc: int, nodes: int, tmp_path):
    injected = moments(training, nodes)
    ftrun = ("--respawn", "--ft-inject", ",".join(injected.values()))
    job = Job(tmp_path / "job", training, ITERATIONS, nproc=nproc, spares=3, ftrun=ftrun, flags=EVALUATED)
    with job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, *EVALUATED)
    check_survivors(result, training.world)
    fired = {p.name for p in (tmp_path / "job").glob("injected-*")}
    assert len(fired) == len(injected), f"not every failure happened: {sorted(fired)}"
    assert result.recoveries >= len(injected) - 1  # two that fall together are one recovery


@pytest.mark.timeout(300)  # a minute, where the machine has nothing else to do
@pytest.mark.parametrize(
    ("training", "nproc", "seed"),
    [
        (Zero(0), 1, 1),
        (Zero(1), 1, 2),
        (Zero(2, gas=2), 1, 3),
        (Zero(3), 1, 4),
        (Pipeline(), 2, 5),
    ],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_random_kills(training: Training, nproc: int, seed: int, tmp_path):
    """As in test_random.py."""
    dice = random.Random(seed)
    iterations = KILLS * (STEPS + 3)
    with Job(tmp_path / "job", training, iterations, nproc=nproc, spares=1, ftrun=("--respawn",)) as job:
        epoch = 0
        for number in range(KILLS):
            resumed = job.wait_for_epoch("resumed", epoch + 1, timeout=120)
            epoch = resumed["epoch"]
            due = time.monotonic() + dice.uniform(0.1, 0.8)
            while time.monotonic() < due and job.step() < resumed["version"] + STEPS:
                time.sleep(0.01)
            kind, role = dice.choice(("node", "worker", "worker")), dice.randrange(training.world)
            agent, worker = job.pids(role)
            print(f"seed {seed}, kill {number + 1}: {kind} of role {role}, step {job.step()}", flush=True)
            if kind == "node":
                os.killpg(agent, signal.SIGKILL)
            else:
                os.kill(worker, signal.SIGKILL)
        job.wait_for_epoch("resumed", epoch + 1, timeout=120)
        result = job.finish(timeout=200)
    check_identical(result, training, iterations)
    check_survivors(result, training.world)
    check_clean(result)
    assert result.recoveries == KILLS
