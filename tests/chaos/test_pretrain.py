"""`megatron.training.pretrain` under `ftrun` with `--ft`: killed wherever it may be, it ends bit-identically.

Whatever Megatron writes is compared with a run without fault tolerance: its checkpoints, tensor by tensor,
and the lines of its log.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib import request

import pytest
from harness import RECIPES, ROOT, Job, forks, read_logs
from megatron_jobs import (
    DISTOPT,
    LATEST,
    MOE,
    OVERLAP,
    RELEASES,
    Pretrain,
    compare_checkpoints,
    indexed,
    installed,
    losses,
    reference,
    scalars,
    survives,
)

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")
pytestmark = pytest.mark.timeout(300)  # a minute, where the machine has nothing else to do

EVALUATION = ("--eval-interval=6", "--eval-iters=2")
SAVES = ("--save-interval=12",)
"""One after the last step comes on top, as evaluations do."""

EVERYWHERE = (
    "3@startup:0:worker",
    "0@forward:2",
    "2@backward:5:worker",
    "3@evaluate:6:worker",
    "1@gradients:8:worker",
    "2@optimizer:10",
    "0@save:12:worker",
    "3@between:15:worker",
    "1@evaluate:18:worker",
    "3@gather:20",
    "3@save:31:worker",
    "0@evaluate:32:worker",
)
"""Training, evaluation, saving, between two steps; whole nodes, role 0's too.

After the last step, the loop's end and each evaluation and checkpoint count as one step more.
"""
ELSEWHERE = (
    "1@startup:0",
    "3@forward:3:worker",
    "0@gather:5:worker",
    "2@evaluate:6",
    "1@backward:9:worker",
    "2@save:12:worker",
    "0@between:15",
    "3@d2h:19:worker",
    "0@save:24:worker",
    "2@evaluate:30:worker",
    "1@save:31:worker",
    "3@evaluate:33:worker",
)
"""The same, the other way round."""


class Phased(Pretrain):
    """Its data is another from the fifth iteration on."""

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        flags = super().arguments(iterations, protected)
        flags[flags.index(f"--train-iters={iterations}")] = f"--train-samples={8 * iterations}"
        return [*flags, "--phase-transition-iterations=4"]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a dataset of bytes: this project's own sources."""
    return prepared(ROOT / "ft_core", tmp_path_factory.mktemp("data"))


def prepared(folder: Path, directory: Path) -> Path:
    """The prefix of a dataset of the bytes of that folder's files."""
    arguments = ["--input", str(folder), "--output-prefix", str(directory / "text")]
    forks(Pretrain()).run(RECIPES[0] / "prepare_data.py", arguments, 1, directory / "logs")
    return directory / "text"


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where that megatron-core was installed, for PYTHONPATH: it needs nothing else."""
    return installed(request.param, tmp_path_factory.mktemp("megatron"))


def test_mock_data(tmp_path: Path) -> None:
    training = Pretrain(pp=2, more=(*DISTOPT, "--bf16", *EVALUATION))
    survives(training, 30, EVERYWHERE, tmp_path, *SAVES)


def test_indexed_data(text: Path, tmp_path: Path) -> None:
    training = Pretrain(tp=2, more=(*OVERLAP, *EVALUATION), data=indexed(text))
    survives(training, 30, ELSEWHERE, tmp_path, *SAVES)


def test_not_each_version_is_protected(tmp_path: Path) -> None:
    """Several finished steps are done again, an evaluation among them, and nothing is logged twice."""
    training = Pretrain(pp=2, more=(*DISTOPT, "--bf16", "--eval-interval=5", "--eval-iters=2"))
    injected = (
        "3@forward:5:worker",
        "0@save:7:worker",
        "3@evaluate:10:worker",
        "2@optimizer:11",
        "1@gather:15",
    )
    result = survives(training, 16, injected, tmp_path, "--save-interval=7", ftrun=("--ft-every=3",))
    versions = [event["version"] or 0 for event in result.of("decided")]
    assert versions[1] <= 3, "the step that was under way was the third after a protected version"
    assert versions[2] == 7, "the checkpoint's version is protected, whichever are"


def test_release(release: Path, tmp_path: Path) -> None:
    """The main case with another megatron-core, in short."""
    training = Pretrain(pp=2, more=(*DISTOPT, "--bf16", *EVALUATION), megatron=release)
    survives(training, 14, ("0@gradients:3", "3@evaluate:6:worker", "0@save:12:worker"), tmp_path, *SAVES)


def test_tensorboard(tmp_path: Path) -> None:
    """Each value once, at its step, whoever wrote it."""
    training, directories = Pretrain(pp=2, more=(*DISTOPT, *EVALUATION)), (tmp_path / "a", tmp_path / "b")
    plain, protected = (f"--tensorboard-dir={directory}" for directory in directories)
    reference(training, 10, tmp_path / "plain", plain)
    places = "3@gradients:2:worker,2@evaluate:6,3@between:8:worker"
    with Job(
        tmp_path / "job", training, 10, nproc=2, ftrun=("--ft-inject", places), flags=(protected,)
    ) as job:
        result = job.finish()
    expected, found = map(scalars, directories)
    assert result.code == 0 and result.recoveries == 3
    assert "lm loss" in expected and found == expected


class Sniffing(Pretrain):
    """Megatron looks which device is slow."""

    @property
    def script(self) -> Path:
        return Path(__file__).with_name("sniffing_pretrain.py")


def test_looks_at_the_devices(tmp_path: Path) -> None:
    """What they draw is drawn once, and a newcomer has nothing to report of the step before it came."""
    looks = ("--log-straggler", "--straggler-ctrlr-port=0", "--gpu-sniff-test-interval=3")
    training = Sniffing(pp=2, more=(*DISTOPT, *looks))
    injected = ("3@backward:2:worker", "0@forward:5", "1@between:6:worker")
    survives(training, 8, injected, tmp_path, "--save-interval=4")


def test_the_loss_is_on_the_page(tmp_path: Path) -> None:
    """As Megatron logs it, before and after its role was taken over."""
    with Job(tmp_path / "job", Pretrain(pp=2), 1_000_000, nproc=2) as job:
        job.wait_for("resumed")
        url = (job.job_dir / "http").read_text().strip()

        def loss() -> float | None:
            with request.urlopen(f"{url}/api/stream", timeout=30) as stream:
                state = next(line for line in iter(stream.readline, b"") if line.startswith(b"data: "))
            found: float | None = json.loads(state[6:])["series"][-1][5]
            return found

        before = job.until(loss, "a loss")
        job.kill_worker(3)
        job.wait_for("resumed", 2)
        job.until(lambda: loss() != before, "another")


def test_newcomer_to_a_job_that_was_resumed(tmp_path: Path) -> None:
    """The job went on from the checkpoint of step 4; who joins it at step 7 finds that of step 6."""
    expected, saved = tmp_path / "expected", tmp_path / "saved"
    training, every = Pretrain(pp=2, more=DISTOPT), "--save-interval=2"
    text = reference(training, 8, tmp_path / "plain", "--save", str(expected), every)
    shutil.copytree(expected / "iter_0000004", saved / "iter_0000004")
    (saved / LATEST).write_text("4")
    flags = ("--save", str(saved), "--load", str(saved), every)
    ftrun = ("--ft-inject", "3@between:5:worker,0@backward:7")
    with Job(tmp_path / "job", training, 8, nproc=2, ftrun=ftrun, flags=flags) as job:
        result = job.finish()
    assert without(6, sorted(losses(read_logs(tmp_path / "job")))) == without(6, losses(text)[4:])
    compare_checkpoints(expected / "iter_0000008", saved / "iter_0000008")
    assert result.code == 0 and result.recoveries == 2


def test_newcomer_to_a_job_that_was_resumed_in_another_phase(tmp_path: Path) -> None:
    """A phase has a data set of its own: here of more epochs than the first one's, in another order."""
    expected, saved, texts = tmp_path / "expected", tmp_path / "saved", tmp_path / "texts"
    texts.mkdir()
    for number in range(10):
        (texts / f"{number}.txt").write_text(f"text {number} " * 10)
    training, every = Phased(pp=2, more=DISTOPT, data=indexed(prepared(texts, tmp_path))), "--save-interval=2"
    for _ in range(2):  # Megatron leaves where a phase ends
        arguments = [
            *training.arguments(10, protected=False),
            "--save",
            str(expected),
            "--load",
            str(expected),
        ]
        text = forks(training).run(training.script, [*arguments, every], training.world, tmp_path / "plain")[
            -1
        ]
        if not saved.exists():
            shutil.copytree(expected, saved)
    assert (saved / LATEST).read_text() == "4"
    flags = ("--save", str(saved), "--load", str(saved), every)
    ftrun = ("--ft-inject", "1@startup:0:worker,3@between:5:worker,0@backward:7")
    with Job(tmp_path / "job", training, 10, nproc=2, ftrun=ftrun, flags=flags) as job:
        result = job.finish()
    assert sorted(losses(read_logs(tmp_path / "job"))) == losses(text) != []
    compare_checkpoints(expected / "iter_0000010", saved / "iter_0000010")
    assert result.code == 0 and result.recoveries == 3


def test_more_nodes_lost_than_there_are_copies(tmp_path: Path) -> None:
    """It starts over, from what Megatron has saved last."""
    expected, saved = tmp_path / "expected", tmp_path / "saved"
    training, every = Pretrain(ep=4, more=(*MOE, *DISTOPT)), "--save-interval=4"
    text = reference(training, 12, tmp_path / "plain", "--save", str(expected), every)
    flags = ("--save", str(saved), every)
    with Job(tmp_path / "job", training, 12, nproc=1, spares=2, ftrun=("--respawn",), flags=flags) as job:
        job.until((saved / LATEST).exists, "a checkpoint", timeout=150)
        job.kill_nodes(0, 1)
        result = job.finish()
    assert result.code == 0, result.output[-4000:]
    assert result.of("starting_over")
    assert without(6, sorted(set(losses(read_logs(tmp_path / "job"))))) == without(6, losses(text))
    assert "loaded checkpoint" in read_logs(tmp_path / "job")
    compare_checkpoints(expected / "iter_0000012", saved / "iter_0000012")


def without(iteration: int, lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """All but that one: the loss in the second line after a start is Megatron's average of the first two."""
    return [line for line in lines if line[0] != iteration]
