"""Whole jobs under NCCL's rules (`ft_core.comm.strict`): what gloo forgives hangs here, or leaves garbage.

The undisturbed run that each is compared with is one over gloo. `make test-strict` runs the quick jobs of all
other files under these rules.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import test_deepspeed, test_moments
from deepspeed_jobs import Pipeline, Zero
from harness import Job, Layout, Training, check_identical, check_survivors

pytestmark = pytest.mark.timeout(300)  # a minute, where the machine has nothing else to do


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_COMM", "strict")


@pytest.mark.parametrize(
    "layout",
    [Layout(1, 2, 2, True, True), Layout(2, 2, 1, False, True), Layout(1, 1, 2, True, False)],
    ids=str,
)
def test_every_moment(layout: Layout, tmp_path: Path) -> None:
    test_moments.test_every_moment(layout, tmp_path)


@pytest.mark.parametrize(
    ("training", "nproc"),
    [
        (Zero(1, gas=2), 1),
        (Zero(2, bf16=True), 1),
        (Zero(3, gas=2, bf16=True, more=test_deepspeed.LOADERS), 1),
        (Pipeline(more=test_deepspeed.LOADERS), 2),
    ],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_every_moment_with_deepspeed(training: Training, nproc: int, tmp_path: Path) -> None:
    test_deepspeed.test_every_moment(training, nproc, 1, tmp_path)


def test_a_link_fails_while_all_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception tells of it, and the operation never ends: who sees it says so, and all begin anew."""
    monkeypatch.setenv("FT_STRICT_FAULT", "link:1:9")
    layout = Layout(1, 1, 2, True, True)
    with Job(tmp_path / "job", layout, 12, spares=1, ftrun=("--respawn",)) as job:
        result = job.finish()
    check_identical(result, layout, 12)
    check_survivors(result, layout.world)
    [found] = [event for event in result.events if event["event"] == "detected"]
    assert found["roles"] == [] and "cannot end: strict reports COMM_ERROR" in found["reason"]
    assert [e["roles"] for e in result.events if e["event"] == "suspected"] == [[1]]


@pytest.mark.parametrize("fault", ["abort:0:8", "opening:0:2", "memory:0:2"])
def test_a_survivor_is_late(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its communicators to be aborted, or gets no others: nobody else is lost of that."""
    monkeypatch.setenv("FT_STRICT_FAULT", fault)
    layout = Layout(1, 1, 2, True, True)
    inject = ("--ft-inject", "1@forward:5:worker")
    with Job(tmp_path / "job", layout, 12, spares=1, ftrun=("--respawn", *inject)) as job:
        result = job.finish()
    check_identical(result, layout, 12)
    check_survivors(result, layout.world)
