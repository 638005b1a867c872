"""The convergence experiment: a run trains what the engine's rules deal, and the command works."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.common import environment
from benchmarks.convergence import BASELINE, QUICK, SETTINGS, Run, draw, text


@pytest.fixture(scope="module")
def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other more than they compute
    yield text(QUICK)
    torch.set_num_threads(threads)


def test_every_sample_once_whoever_is_away(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    run = Run(QUICK, 0, *data)
    run.go_on(0.3)
    run.go_on(0.6, away=3, intervention="sqrt")
    assert run.adam.param_groups[0]["lr"] == pytest.approx(QUICK.lr(run.seen) * math.sqrt(5 / 8))
    run.go_on(1.0)
    assert run.adam.param_groups[0]["lr"] == QUICK.lr(run.seen)
    assert run.step > QUICK.steps
    assert len(run.curve()) == QUICK.bins  # raises unless all were trained, once each


def test_a_copy_that_loses_nobody_goes_on_as_the_original(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    run = Run(QUICK, 0, *data)
    run.go_on(0.3)
    copied = run.copied()
    run.go_on(1.0)
    copied.go_on(1.0)
    assert torch.equal(run.curve(), copied.curve())
    assert run.validated == copied.validated


def test_a_step_is_that_of_the_mean_over_the_groups(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    run = Run(QUICK, 0, *data)
    before = run.copied()
    before.adam.zero_grad()
    for group in range(QUICK.groups):
        (before.model.losses(run.train[[group]]).mean() / QUICK.groups).backward()
    run.go_on(0.0)
    for mine, theirs in zip(run.model.parameters(), before.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.convergence", "--quick", "--json", "--seeds", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert list(result["settings"]) == [BASELINE, *(setting.name for setting in SETTINGS)]
    away = result["settings"]["3 away long, sqrt"]
    assert away["steps"] > QUICK.steps
    before_they_left = round(0.3 * QUICK.bins)
    assert not any(away["deviation_curve"][:before_they_left])
    assert any(away["deviation_curve"][before_they_left:])
    pytest.importorskip("matplotlib")
    draw(result, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size
