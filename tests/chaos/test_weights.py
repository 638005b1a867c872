"""Scripts that do things with their weights before the first step: jobs end bit-identically."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from deepspeed_jobs import SCRIPTS, TWICE, Zero
from harness import Job, check_drills, check_identical, check_survivors

ITERATIONS = 8
KILLS = ("1@forward:3:worker", "0@optimizer:5")
"""A worker's role goes to its node's standby, a node's to the spare's worker."""


@dataclass(frozen=True)
class Scripted(Zero):
    """With one of the tests' scripts."""

    name: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.name}"

    @property
    def script(self) -> Path:
        return SCRIPTS / f"{self.name}.py"


@pytest.mark.parametrize(
    "training",
    [
        Scripted(3, dp=2, bf16=True, name="made_in_parts"),
        Scripted(1, dp=2, name="looks_at_weights"),
        Scripted(2, dp=2, name="stranger"),
    ],
    ids=lambda training: training.name,
)
def test_script(training: Scripted, tmp_path: Path) -> None:
    ftrun = ("--respawn", "--ft-inject", ",".join(KILLS))
    about = {"nproc": 1, "spares": 3, "ftrun": ftrun}
    with Job(tmp_path / "job", training, ITERATIONS, **about) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, again=TWICE * len(KILLS))
    check_survivors(result, training.world)
    check_drills(result, KILLS)
