"""The lowest and the highest DeepSpeed that is supported: with both, jobs of all kinds survive."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from deepspeed_jobs import TWICE, Pipeline, Zero, variables
from harness import Job, Training, check_identical, check_survivors, environment

LOWEST = "0.17.0"
HIGHEST = "0.19"
STEPS = 8
EXHAUSTIVE = pytest.mark.exhaustive


@dataclass(frozen=True)
class Versioned:
    """A training with the DeepSpeed that lies in a folder, or with the one that is installed."""

    training: Training
    folder: Path | None = None

    @property
    def world(self) -> int:
        return self.training.world

    @property
    def script(self) -> Path:
        return self.training.script

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return self.training.arguments(iterations, protected)

    def environment(self) -> dict[str, str]:
        return variables(*[self.folder] if self.folder else [])


@pytest.fixture(scope="session")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was installed. It comes as source, of which nothing needs to be compiled."""
    folder = tmp_path_factory.mktemp("deepspeed") / LOWEST
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    command += [f"--target={folder}", f"deepspeed=={LOWEST}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return folder


TRAININGS = [Zero(0, dp=2), Zero(1, dp=2, gas=2), Zero(2, dp=2, bf16=True), Zero(3), Pipeline()]


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(x, id=str(x), marks=[] if x in (Zero(1, dp=2, gas=2), TRAININGS[-2]) else EXHAUSTIVE)
        for x in TRAININGS
    ],
)
def test_lowest(training: Training, lowest: Path, tmp_path: Path) -> None:
    check(Versioned(training, lowest), tmp_path / "job")


# All other tests run with the highest.
@EXHAUSTIVE
@pytest.mark.parametrize("training", TRAININGS[-2:], ids=str)
def test_highest(training: Training, tmp_path: Path) -> None:
    check(Versioned(training), tmp_path / "job")


def check(training: Versioned, job_dir: Path) -> None:
    """It loses a node and a worker, and ends bit-identically to an undisturbed run of the same version."""
    assert found_by(training).startswith(LOWEST if training.folder else f"{HIGHEST}.")
    last = training.world - 1
    ftrun = ("--ft-inject", f"0@forward:3,{last}@optimizer:5:worker")
    nproc = 2 if isinstance(training.training, Pipeline) else 1
    with Job(job_dir, training, STEPS, nproc=nproc, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, training, STEPS, again=2 * TWICE)
    check_survivors(result, training.world)
    assert result.recoveries == 2


def found_by(training: Versioned) -> str:
    """The version of DeepSpeed that its processes import."""
    env = environment() | training.environment()
    command = [sys.executable, "-c", _FOUND]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    where, version = told.stdout.split()
    assert training.folder is None or Path(where).is_relative_to(training.folder)
    return version


_FOUND = """
from importlib import metadata, util
print(util.find_spec("deepspeed").origin, metadata.version("deepspeed"))
"""
