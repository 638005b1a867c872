"""Loops on DeepSpeed whose newcomers begin where their peers are, and go through no steps that are done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed_jobs import TWICE, EnteredLoop, Reads, TrainerLoop
from harness import Job, Result, check_clean, check_identical, check_random_kills, check_survivors

from ft_core.cli import timeline

ITERATIONS = 14
_EVALUATED = ("--eval_strategy=steps", "--eval_steps=3")
_EPOCHS = ("--samples=44",)  # of 6 or 11 steps


def _passed(result: Result) -> list[int]:
    """How many steps newcomers' scripts passed over."""
    return [line.passed for line in _newcomers(result)]


def _newcomers(result: Result) -> list[timeline.Line]:
    assert result.job_dir is not None
    return [line for line in timeline.read(result.job_dir) if line.passed]


@pytest.mark.parametrize(
    ("training", "injected"),
    [
        # In its first epoch, at the top of its second, and in the middle of that.
        (
            TrainerLoop(1, data="noisy", more=_EVALUATED),
            "1@forward:4:worker,0@between:6:worker,1@d2h:9:worker",
        ),
        (TrainerLoop(2, data="noisy", gas=2, more=_EPOCHS), "0@forward:6:worker,1@backward:9:worker"),
        (
            TrainerLoop(3, data="plain", more=("--dataloader_num_workers=2",)),
            "0@optimizer:5:worker,1@between:9",
        ),
        (
            TrainerLoop(1, data="noisy", more=("--dataloader_num_workers=1",)),
            "1@forward:5:worker,0@forward:10",
        ),
        (
            TrainerLoop(1, data="stream", more=_EVALUATED),
            "0@forward:5:worker,1@between:8:worker,0@d2h:11:worker",
        ),
        (
            TrainerLoop(
                1,
                data="stream",
                more=('--accelerator_config={"dispatch_batches":false}',),
            ),
            "1@forward:5:worker,0@backward:9:worker",
        ),
        (
            TrainerLoop(
                2,
                data="plain",
                more=("--save_strategy=steps", "--save_steps=6", "--load_best_model_at_end", *_EVALUATED),
            ),
            "0@save:6:worker,1@forward:9:worker",
        ),
    ],
    ids=lambda value: str(value) if not isinstance(value, str) else "",
)
def test_trainer(training: TrainerLoop, injected: str, tmp_path: Path) -> None:
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=("--respawn", "--ft-inject", injected)) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, again=TWICE * injected.count("@"))
    check_survivors(result, training.world)
    check_clean(result)
    assert result.recoveries == injected.count("@")
    assert _passed(result) == [1] * injected.count("@")


@pytest.mark.parametrize(
    ("training", "least"),
    [
        # It looks at each fifth, and the first of an epoch and the last three are loaded.
        (Reads(1), [6, 15]),
        # Its processes have begun to load the first before anybody knew what to leave out.
        (Reads(3, workers=2), [3, 11]),
        (Reads(1, "noisy"), [0, 0]),
    ],
    ids=str,
)
def test_a_newcomer_does_not_load_what_is_done(training: Reads, least: list[int], tmp_path: Path) -> None:
    """But for what its script looks at."""
    inject = ("--respawn", "--ft-inject", "1@forward:13:worker,0@between:26:worker")
    with Job(tmp_path / "job", training, 30, ftrun=inject) as job:
        result = job.finish()
    check_identical(result, training, 30, again=TWICE * 2)
    check_survivors(result, training.world)
    check_clean(result)
    assert result.recoveries == 2
    left_out = [line.left_out for line in _newcomers(result)]
    assert left_out >= least and (training.kind == "plain" or left_out == least)


def test_data_that_are_read_on_unseen_are_loaded_from_the_beginning(tmp_path: Path) -> None:
    """By a job whose scripts begin again: what a newcomer left out, it missed."""
    (file := tmp_path / "numbers").write_bytes(bytes(range(256)) * 8)
    training = Reads(1, "read-on", read_on=file)
    with Job(tmp_path / "job", training, 16, ftrun=("--ft-inject", "1@forward:9:worker")) as job:
        result = job.finish()
    check_identical(result, training, 16, again=16)
    check_clean(result)
    assert "it loads data by what was loaded before, in a way that is not seen" in result.output


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loop_that_is_entered_again(stage: int, tmp_path: Path) -> None:
    training = replace(EnteredLoop(stage), entered=str(tmp_path / "entered"))
    injected = "1@forward:4:worker,0@optimizer:7:worker,1@between:10:worker"
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=("--respawn", "--ft-inject", injected)) as job:
        result = job.finish()
    check_identical(result, EnteredLoop(stage), ITERATIONS)
    check_survivors(result, training.world)
    assert result.recoveries == 3
    entered = [tuple(map(int, line.split())) for line in (tmp_path / "entered").read_text().splitlines()]
    assert all(step >= 3 for _, step in entered[2:])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kills", "seed"), [(4, 1), pytest.param(20, 2, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_trainer_under_random_kills(kills: int, seed: int, tmp_path: Path) -> None:
    """Of workers, agents and nodes, at any moment: in evaluation, or while data are read."""
    training = TrainerLoop(1, data="stream", more=("--eval_strategy=steps", "--eval_steps=5"))
    kinds = ("node", "agent", "worker", "worker")
    check_random_kills(tmp_path / "job", training, 1, seed, kills, kinds, again=TWICE)
