"""DeepSpeed features and habits of scripts that a failure must not disturb."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_jobs import (
    SCRIPTS,
    TWICE,
    Accelerated,
    Coalesced,
    Habits,
    HuggingFace,
    Keeps,
    OwnLoop,
    Phases,
    Preference,
    Quirks,
    Resumes,
    Unbalanced,
    WritesState,
    Zero,
)
from harness import ROOT, Job, Training, check_clean, check_identical, check_survivors, environment, reference

ITERATIONS = 14


@pytest.mark.parametrize(
    ("training", "injected"),
    [
        # After the last step its weights must be whole without a call of the engine's.
        (Zero(2, fp16=True), f"1@optimizer:3,0@forward:7:worker,2@between:{ITERATIONS}:worker"),
        # Weights of more than a MiB, which the record of start-up does not keep.
        (Zero(2, more=("--hidden-size=304",)), "1@forward:3:worker,0@optimizer:6"),
        (Zero(2, offload=True), "0@gather:4,2@backward:9:worker"),
        pytest.param(
            *(OwnLoop(0), "0@forward:3,1@between:6:worker,2@backward:10:worker"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            *(OwnLoop(2, direct=True), "2@gradients:3,0@between:6:worker,0@d2h:10:worker"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *(OwnLoop(3, direct=True), "1@backward:3,2@between:6:worker,0@forward:10:worker"),
            marks=pytest.mark.exhaustive,
        ),
        # A newcomer is yet to be given its average when the next epoch begins, where its weights are derived.
        (OwnLoop(2), "2@optimizer:3:worker,1@derive:3:worker,0@between:9:worker"),
        # In the middle of its second epoch, so that orders of the first are gone.
        (Habits(1), "0@forward:12:worker,1@between:13:worker"),
        (Habits(3), "1@forward:12:worker"),
        (Quirks(), "0@forward:5:worker,1@d2h:9:worker"),
        *((Coalesced(stage), "1@forward:2:worker,0@backward:6:worker,1@gradients:9") for stage in (2, 3)),
        (Accelerated(2), "0@forward:5:worker,1@save:6:worker,0@between:9:worker"),
        (HuggingFace(2, more=("--dataloader_num_workers=2",)), "0@backward:4,1@between:8:worker"),
    ],
    ids=lambda value: str(value) if not isinstance(value, str) else "",
)
def test_variant(training: Training, injected: str, tmp_path):
    ftrun = ("--respawn", "--ft-inject", injected)
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, again=TWICE * injected.count("@"))
    assert "got no gradient" not in result.output
    check_survivors(result, training.world)
    check_clean(result)  # loader processes, too
    assert result.recoveries == injected.count("@")


@pytest.mark.parametrize(
    "training",
    [*map(WritesState, (0, 1, 3)), WritesState(2, only="buffers"), WritesState(1, only="passes")],
    ids=str,
)
def test_state_that_the_script_writes_between_steps(training: WritesState, tmp_path: Path) -> None:
    """Which is not done again for it where it is."""
    injected = "1@between:4:worker,0@forward:6:worker,1@d2h:10:worker"
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=("--respawn", "--ft-inject", injected)) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, again=ITERATIONS * injected.count("@"))
    check_clean(result)


def test_gradients_of_earlier_steps_that_stage_3_goes_by_are_named(tmp_path: Path) -> None:
    """A failure loses them, so nobody may expect the same losses after it."""
    inject = ("--respawn", "--ft-inject", "1@forward:3:worker")
    with Job(tmp_path / "job", Unbalanced(3, accumulation=2), 6, ftrun=inject) as job:
        result = job.finish()
    assert result.recoveries == 1 and len(result.losses) == 6
    named = "got no gradient in its first micro batch: 2 (sometimes.weight, sometimes.bias)"
    assert result.output.count(f"role 0: step 1: parameters that {named}") == 1


def test_a_step_that_cannot_be_made_again_on_a_scripts_behalf(tmp_path):
    """The script changes gradients, and has a loss with terms of its own: its worker begins anew."""
    training = Quirks(gradients=True)
    ftrun = ("--respawn", "--ft-inject", "1@optimizer:6:worker,0@backward:10:worker")
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, again=TWICE * 4)
    check_clean(result)


@pytest.mark.parametrize(
    ("training", "injected"),
    [
        (Preference(1, 0), "1@forward:4:worker,0@between:7:worker"),
        # Others are in the reference's pass, which gathers its weights; one of more than a MiB is among them.
        (Preference(3, 3), "1@between:4:worker,0@evaluate:7:worker,1@backward:10:worker"),
        (Preference(3, 3, ("--after",)), "0@evaluate:3:worker,1@d2h:7:worker"),
    ],
    ids=str,
)
def test_an_engine_beside_the_protected_one(training: Preference, injected: str, tmp_path):
    """It has no optimizer, and comes first, with the section in its configuration, or last."""
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=("--respawn", "--ft-inject", injected)) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, again=TWICE * injected.count("@"))
    check_survivors(result, training.world)
    check_clean(result)
    assert result.recoveries == injected.count("@")


def test_a_reference_that_changes_is_not_gone_on_with_unless_it_is_kept(tmp_path):
    """It is moved towards the model from step to step: a newcomer's is not where its predecessor's was."""
    inject = ("--respawn", "--ft-inject", "1@forward:8:worker")
    for more, anew in (("--moves",), True), (("--moves", "--keeps"), False):
        training = Preference(1, 0, more)
        with Job(tmp_path / "-".join(more), training, ITERATIONS, ftrun=inject) as job:
            result = job.finish()
        check_identical(result, training, ITERATIONS, again=2 * ITERATIONS)
        assert bool(result.of("begins_anew")) is anew
        assert ("keep(reference=model)" in result.output) is anew


@pytest.mark.parametrize(
    ("more", "kept"), [((), ""), (("--best",), "best"), (("--running",), "correct")], ids=str
)
def test_what_a_script_keeps_of_steps_that_its_newcomer_passes(more: tuple[str, ...], kept: str, tmp_path):
    """An accuracy that it computes and logs is no harm; what it keeps is named, and all begin anew."""
    training = Keeps(more)
    inject = ("--respawn", "--ft-inject", "0@forward:10:worker")
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=inject) as job:
        result = job.finish()
    check_identical(result, training, ITERATIONS, again=2 * ITERATIONS)
    check_clean(result)
    assert bool(result.of("begins_anew")) is bool(kept), result.output[-3000:]
    assert f"keep({kept}=...)" in result.output or not kept


def test_an_engine_after_another_is_as_safe_as_its_own_checkpoints(tmp_path):
    """A failure while the first trains costs nothing; while the second does, a restart: from what the script
    has saved, and not from a durable checkpoint of the first."""
    iterations, directories = 14, [tmp_path / "undisturbed", tmp_path / "own"]
    for directory in directories:
        directory.mkdir()
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}", "--ft-durable-interval=5")
    training = Phases(directories[1], dies_at=11)
    ftrun = ("--respawn", *durable, "--ft-inject", "0@forward:3:worker")
    with Job(tmp_path / "job", training, iterations, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, Phases(directories[0]), iterations, again=TWICE + 2)
    assert result.recoveries == 2
    [restart], [told] = result.of("begins_anew"), result.of("unprotected")
    assert restart["rung"] == "restart" and "initialize again after step 6" in told["reason"]


@pytest.mark.parametrize("step", [2, 7])
def test_a_script_that_resumes_from_a_file_of_its_own(step: int, tmp_path):
    """A newcomer that begins from a file that was not there when its predecessor began is not where it would
    be answered from: all scripts go on from that."""
    iterations = 10
    training = Resumes(tmp_path / "own.pt")
    ftrun = ("--respawn", "--ft-inject", f"1@forward:{step}:worker")
    with Job(tmp_path / "job", training, iterations, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, Resumes(tmp_path / "undisturbed.pt"), iterations, again=4)
    rungs = [event["rung"] for event in result.of("begins_anew")]
    assert rungs == (["all", "restart"] if step > 4 else [])
    assert f"it goes by {training.own}" in result.output or not rungs


def test_a_second_engine_is_refused_by_name_and_once(tmp_path):
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", "--nproc-per-node=2"]
    command += [f"--job-dir={tmp_path / 'job'}", str(SCRIPTS / "two_engines.py")]
    variables = environment() | OwnLoop(1).environment()
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100)
    refusal = "deepspeed.initialize was called again: fault_tolerance protects one engine per process"
    assert done.returncode == 1
    assert done.stderr.count(refusal) == 1 and "Traceback" not in done.stderr
    assert done.stdout.count(f"refused: {refusal}") == 2 * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_of_the_script(stage: int, tmp_path):
    """A failure while it saves; and newcomers find a checkpoint that was not there when their peers began."""
    training = OwnLoop(stage, checkpoints=tmp_path / "checkpoints", seeded=True, direct=True)
    ftrun = ("--respawn", "--ft-inject", "0@save:5:worker,1@forward:7,0@save:10,2@forward:13:worker")
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, OwnLoop(stage, seeded=True, direct=True), ITERATIONS, again=TWICE * 4)
    check_survivors(result, training.world)
    assert result.recoveries == 4
    # Records of steps before 15 are dropped once that is saved.
    ftrun = ("--ft-inject", "1@backward:12:worker,2@forward:17:worker")
    with Job(tmp_path / "again", training, ITERATIONS + 4, ftrun=ftrun) as job:
        again = job.finish()
    assert again.recoveries == 2
    assert set(again.losses) == set(range(11, ITERATIONS + 5))


def test_a_durable_checkpoint_that_is_older_than_the_scripts_own(tmp_path):
    """Newcomers' scripts have begun with theirs, and cannot go back: all begin there."""
    training, iterations = OwnLoop(1, checkpoints=tmp_path / "checkpoints", seeded=True), 40
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}", "--ft-durable-interval=20")
    with Job(tmp_path / "job", training, iterations, ftrun=(*durable, "--respawn")) as job:
        job.wait_for_step(28)
        job.kill_nodes(0, 1, 2)
        result = job.finish()
    assert set(result.losses) == set(range(1, iterations + 1))
    assert "its own checkpoint of step 25" in result.of("starting_over")[0]["reason"]
    check_clean(result)


@pytest.mark.parametrize(
    ("training", "kinds"),
    [(Zero(1), ("full", "lean")), (Zero(2, bf16=True), ("lean", "full"))],
    ids=lambda value: str(value) if isinstance(value, Zero) else value[0],
)
def test_a_durable_checkpoint_of_either_kind_starts_a_job_of_either(
    training: Zero, kinds: tuple[str, str], tmp_path: Path
):
    durable, last = (f"--ft-durable-dir={tmp_path / 'durable'}", "--ft-durable-interval=5"), ITERATIONS + 6
    before, then = ((*durable, f"--ft-snapshot={kind}") for kind in kinds)
    with Job(tmp_path / "first", training, ITERATIONS, spares=0, ftrun=before) as job:
        job.wait_for("durable")
        job.finish()
    inject = ("--respawn", f"--ft-inject=1@gather:{ITERATIONS}:worker")
    with Job(tmp_path / "second", training, last, spares=0, ftrun=(*then, *inject)) as job:
        result = job.finish()
    began = result.of("decided")[0]
    assert began["origin"] == "durable" and began["version"] >= 5
    assert result.recoveries == 1
    assert result.code == 0 and result.digest == reference(training, last).digest


def test_more_than_replicas_cover_falls_back_to_the_durable_checkpoint(tmp_path):
    """A survivor whose calls since that step are too many to be known is replaced as well."""
    training, iterations = OwnLoop(1), 150
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}", "--ft-durable-interval=20")
    with Job(tmp_path / "job", training, iterations, ftrun=(*durable, "--respawn")) as job:
        job.wait_for_step(28)
        job.kill_nodes(0, 1)
        result = job.finish()
    check_identical(result, training, iterations, again=iterations)  # those since the checkpoint
    assert "durable" in {event["origin"] for event in result.of("decided")}
