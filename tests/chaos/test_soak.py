"""Random faults, one after the other, whatever the job is at: a short run of `benchmarks.soak`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, environment

FAULTS = 12


@pytest.mark.timeout(600)  # 90 s, where the machine has nothing else to do
@pytest.mark.parametrize(
    ("script", "policy", "ready", "seed"),
    [
        ("core", "wait", 0, 1),
        pytest.param("core", "shrink", 1, 2, marks=pytest.mark.exhaustive),
        pytest.param("zero1", "wait", 1, 3, marks=pytest.mark.exhaustive),
        pytest.param("zero1", "shrink", 0, 4, marks=pytest.mark.exhaustive),
        pytest.param("zero3", "wait", 0, 5, marks=pytest.mark.exhaustive),
    ],
)
def test_random_faults(script: str, policy: str, ready: int, seed: int, tmp_path: Path) -> None:
    flags = [f"--script={script}", f"--policy={policy}", f"--ready={ready}", f"--faults={FAULTS}"]
    command = [sys.executable, "-m", "benchmarks.soak", "--json", f"--seed={seed}", *flags]
    done = subprocess.run(
        [*command, f"--keep={tmp_path}"], env=environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["ended"], found["code"]) == (True, 0)
    assert sum(found["faults"].values()) == FAULTS
    assert found["recoveries"] and found["left_s"] is not None
    assert found["digest"] == "equal" or found["groups_left"]
    # Whoever does not leave its step is ended for it.
    logs = [path.read_text() for path in tmp_path.glob("console")]
    assert logs and not any("did not leave its step" in text for text in logs)
