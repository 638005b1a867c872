"""Random failures, one after the other: the job ends bit-identically all the same."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from harness import Job, Layout, check_clean, check_identical, check_survivors

KILLS = 8
STEPS = 10
"""A kill comes after so many steps at the latest, so that all of them fit in on a machine of any speed."""
ITERATIONS = KILLS * (STEPS + 3)
KINDS = ("node", "agent", "worker", "worker")


@pytest.mark.timeout(300)  # a minute, where the machine has nothing else to do
@pytest.mark.parametrize(
    ("layout", "nproc", "seed"),
    [
        (Layout(1, 2, 2, distributed=True, bf16=True), 2, 1),
        (Layout(2, 1, 2), 2, 2),
        (Layout(1, 1, 2, distributed=True), 1, 3),
        (Layout(2, 2, 1, bf16=True), 2, 4),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else None,
)
def test_random_kills(layout: Layout, nproc: int, seed: int, tmp_path):
    """Nodes, agents and workers die at random moments of whatever step it is.

    The next victim is chosen once the job has resumed from the last failure, which says that every role has
    finished a step: a step cannot finish before the version it began from is committed, so that version is
    then held twice again. Earlier, the loss of a second node could be more than k = 1 promises to survive:
    the newcomer's state may exist nowhere but on the node it was just fetched from.
    """
    dice = random.Random(seed)
    started = time.monotonic()
    with Job(tmp_path / "job", layout, ITERATIONS, nproc=nproc, spares=1, ftrun=("--respawn",)) as job:
        epoch = 0
        for number in range(KILLS):
            resumed = job.wait_for_epoch("resumed", epoch + 1, timeout=120)
            epoch = resumed["epoch"]
            due = time.monotonic() + dice.uniform(0.1, 0.8)
            while time.monotonic() < due and job.step() < resumed["version"] + STEPS:
                time.sleep(0.01)
            kind, role = dice.choice(KINDS), dice.randrange(layout.world)
            agent, worker = job.pids(role)
            print(
                f"seed {seed}, kill {number + 1} at {time.monotonic() - started:.2f} s: "
                f"{kind} of role {role} (agent {agent}, worker {worker}), epoch {epoch}, step {job.step()}",
                flush=True,
            )
            if kind == "node":
                os.killpg(agent, signal.SIGKILL)
            else:
                os.kill(agent if kind == "agent" else worker, signal.SIGKILL)
        job.wait_for_epoch("resumed", epoch + 1, timeout=120)
        result = job.finish(timeout=200)
    check_identical(result, layout, ITERATIONS)
    check_survivors(result, layout.world)
    check_clean(result)
    assert result.recoveries == KILLS
