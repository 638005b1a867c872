"""Errors in Megatron-LM's own training loop, which knows nothing of all this, and in its own checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from failing_jobs import (
    ENDING,
    EVALUATING,
    LEAVING,
    TROUBLED,
    WHERE,
    Failing,
    check_it_ends_the_job,
    check_nobody_waits_for_who_leaves,
    every_row_that_restarts,
)
from failures import Row
from harness import Job, check_clean
from megatron_jobs import DISTOPT, LATEST, Pretrain, check_log, compare_checkpoints, reference

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

TRAINING = Pretrain(world=2, more=DISTOPT)


@pytest.mark.timeout(400)
def test_a_disk_that_is_full_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """All ranks raise, and Megatron's writers leave little of the reason. Once there is room it goes on."""
    expected, saved = tmp_path / "expected", tmp_path / "saved"
    flags = ("--save-interval=2",)
    text = reference(TRAINING, 4, tmp_path / "plain", *flags, "--save", str(expected))
    steps = sorted(path.name for path in expected.glob("iter_*"))
    full = [saved / steps[0] / path.name for path in (expected / steps[0]).glob("*.distcp")]
    (saved / steps[0]).mkdir(parents=True)
    for path in full:
        path.symlink_to("/dev/full")
    with Job(tmp_path / "job", TRAINING, 4, spares=0, flags=(*flags, "--save", str(saved))) as job:
        job.wait_for("detected", 2, timeout=200)
        for path in full:
            path.unlink()
        result = job.finish(240)
    check_log(result, text)
    faults = {event["fault"] for event in result.of("detected")}
    assert "storage" in faults <= {"storage", "transport"}, "those that are only told of it"
    assert (saved / LATEST).read_text() == "4"
    for step in steps:
        compare_checkpoints(expected / step, saved / step)
    check_clean(result)


@pytest.mark.timeout(600)  # a minute, where the machine has nothing else to do
@pytest.mark.exhaustive
def test_every_row_that_restarts(tmp_path: Path) -> None:
    result, steps, _ = every_row_that_restarts(TRAINING, tmp_path)
    check_log(result, reference(TRAINING, steps, tmp_path / "plain"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ENDING, ids=str)
def test_every_row_that_ends_the_job(row: Row, tmp_path: Path) -> None:
    check_it_ends_the_job(row, TRAINING, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("where", WHERE, ids=str)
def test_nobody_waits_for_who_leaves(how: str, where: tuple[str, int], tmp_path: Path) -> None:
    training = Pretrain(world=2, more=(*DISTOPT, *EVALUATING))
    check_nobody_waits_for_who_leaves(how, where, training, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("failures", "rungs"), [(2, ["all"]), (3, ["all", "restart"])], ids=str)
def test_the_same_error_again_and_again(failures: int, rungs: list[str], tmp_path: Path) -> None:
    """From memory once more, then from Megatron's own newest checkpoint."""
    expected, saved = tmp_path / "expected", tmp_path / "saved"
    flags = ("--save-interval=2",)
    reference(TRAINING, 6, tmp_path / "plain", *flags, "--save", str(expected))
    failing = Failing(TRAINING, failures * ((TROUBLED, "forward", 5, "raise ValueError('no')"),))
    with Job(tmp_path / "job", failing, 6, spares=0, flags=(*flags, "--save", str(saved))) as job:
        result = job.finish(240)
    assert result.code == 0, result.output[-4000:]
    assert [event["rung"] for event in result.of("begins_anew")] == rungs
    compare_checkpoints(expected / "iter_0000006", saved / "iter_0000006")
    check_clean(result)
