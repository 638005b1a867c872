"""What Megatron-LM does of its own accord goes on over a recovery: it ends, grows, checks and logs as ever.

A job is compared with the same training without fault tolerance: its exit code, its checkpoints, its log.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness import Job, Result, check_clean, check_drills, forks
from megatron_jobs import (
    ASYNC_SAVE,
    DISTOPT,
    RELEASES,
    Pretrain,
    check_log,
    compare_checkpoints,
    installed,
    losses,
    survives,
)
from processes import children

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

FOR_LONG = ("--lr-decay-style=constant", "--save-interval=400")
"""What a job has that another than its last iteration ends."""
LOADERS = 6
"""Processes of Megatron's loaders, by default: two for each of three data sets."""
OWN = 3
"""An agent's processes beside those of orphans: a fork server, what tracks its resources, and its pulse."""


@dataclass(frozen=True)
class Featured(Pretrain):
    """The recipe, and what `featured.py` reads from its environment."""

    variables: tuple[tuple[str, str], ...] = field(default=())

    @property
    def script(self) -> Path:
        return Path(__file__).with_name("featured.py")

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        flags = super().arguments(iterations, protected)
        if "--step-batch-size-schedule" in flags:  # which goes with no other size
            flags[(at := flags.index("--global-batch-size")) : at + 2] = []
        return flags

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **dict(self.variables)}

    def protected(self, directory: Path, iterations: int, *injected: str) -> Job:
        """With failures, on two nodes and one that stands by."""
        ftrun = ("--respawn", "--ft-inject", ",".join(injected))
        saves = ("--save", str(directory / "saved"))
        return Job(directory / "job", self, iterations, nproc=2, ftrun=ftrun, flags=saves)

    def plain(self, directory: Path, iterations: int, *more: str) -> str:
        """Without fault tolerance and without a failure: what its last rank printed."""
        arguments = [*self.arguments(iterations, False), "--save", str(directory / "expected"), *more]
        return forks(self).run(self.script, arguments, self.world, directory / "plain")[-1]


def check(result: Result, text: str, injected: tuple[str, ...]) -> None:
    """After all these failures: log and console of `text`, the same checkpoints, nothing left."""
    check_log(result, text)
    assert sorted(losses(result.output)) == losses(text) != [], "the console has other lines than the logs"
    check_drills(result, injected)
    assert result.job_dir is not None
    saved, expected = result.job_dir.parent / "saved", result.job_dir.parent / "expected"
    steps = sorted(path.name for path in expected.glob("iter_*"))
    assert steps and sorted(path.name for path in saved.glob("iter_*")) == steps
    for step in steps:
        compare_checkpoints(expected / step, saved / step)
    check_clean(result)


def test_exit_signal_handler(tmp_path: Path) -> None:
    """SIGTERM to one worker of four, and the job ends with code 0.

    A worker is lost before, whose loader's processes go with it; a node while all save, and a worker when all
    have left training together.
    """
    gate, killed = tmp_path / "gate", tmp_path / "killed"
    training = Featured(
        more=(*DISTOPT, *FOR_LONG, "--exit-signal-handler"),
        variables=(("FT_TEST_GATE", f"4:{gate}"), ("FT_TEST_KILL", f"2:left:{killed}")),
    )
    injected = ("1@backward:2:worker", "3@save:4")
    with training.protected(tmp_path, 500, *injected) as job:
        job.until(lambda: len([*tmp_path.glob("gate-*")]) == training.world, "all at the gate", timeout=100)
        agents, workers = zip(*(job.pids(role) for role in range(training.world)), strict=True)
        assert [len(children(worker)) for worker in workers] == [LOADERS] * training.world
        assert [len(children(agent)) for agent in agents] == [OWN] * training.world, "an orphan is left"
        os.kill(workers[1], signal.SIGTERM)
        gate.touch()
        result = job.finish()
    assert killed.exists()
    check(result, training.plain(tmp_path, 500, "--exit-interval=4"), injected)


def test_exit_interval_sums_and_the_console(tmp_path: Path) -> None:
    """A line for three steps tells of all three, and the console has it, also if its writer's node is lost.

    All leave together by `sys.exit`, although a worker is killed in it.
    """
    killed = tmp_path / "killed"
    training = Featured(
        more=(*DISTOPT, *FOR_LONG, "--exit-interval=9", "--log-interval=3", "--log-params-norm",
              "--log-num-zeros-in-grad", "--timing-log-level=2", "--timing-log-option=minmax"),
        variables=(("FT_TEST_KILL", f"1:exit:{killed}"),),
    )  # fmt: skip
    # At 3 the line has just been written, at 4 and 7 some of a sum is there.
    injected = ("3@between:3", "0@backward:4:worker", "3@optimizer:7:worker", "2@save:9")
    with training.protected(tmp_path, 500, *injected) as job:
        result = job.finish()
    assert killed.exists()
    check(result, training.plain(tmp_path, 500), injected)


def test_a_growing_batch_that_is_run_twice(tmp_path: Path) -> None:
    """Killed as the batch grows, when Megatron saves by itself, after it, and in a step's second run."""
    killed, written = tmp_path / "killed", tmp_path / "written"
    training = Featured(
        more=(*DISTOPT, *FOR_LONG, "--step-batch-size-schedule", "0:8 1024:16 2048:24",
              "--rerun-mode=report_stats"),
        variables=(("FT_TEST_KILL", f"1:again:5:{killed},2:written:4:{written}"),),
    )  # fmt: skip
    # In tokens: 8 samples a step up to the 4th, 16 in the 5th and 6th, then 24. (`--rampup-batch-size` is
    # without effect in 0.19.)
    injected = ("3@between:4:worker", "0@save:4", "2@forward:6:worker", "3@d2h:7")
    with training.protected(tmp_path, 15, *injected) as job:
        result = job.finish()
    assert killed.exists() and written.exists()
    check(result, training.plain(tmp_path, 15), injected)


@pytest.mark.parametrize("release", ["", *(pytest.param(r, marks=pytest.mark.exhaustive) for r in RELEASES)])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(DISTOPT, id="sharded"), pytest.param((), marks=pytest.mark.exhaustive, id="plain")],
)
def test_asynchronous_saves(optimizer: tuple[str, ...], release: str, tmp_path: Path) -> None:
    """Killed before, while and after they are written, and while the last one is."""
    places = ("0:finished:3", "1:writing:6", "2:written:11")
    killed = {place: tmp_path / place.replace(":", "-") for place in places}
    training = Featured(
        # The size of what is written changes with the number of samples: from 256 on it takes another byte.
        more=(*optimizer, *ASYNC_SAVE, "--ckpt-assume-constant-structure", "--global-batch-size=64"),
        variables=(("FT_TEST_KILL", ",".join(f"{place}:{file}" for place, file in killed.items())),),
        megatron=installed(release, tmp_path / "megatron") if release else None,
    )
    injected = ("3@forward:1:worker", "3@forward:4:worker", "2@save:9")
    survives(training, 11, injected, tmp_path, "--save-interval=3")
    assert all(file.exists() for file in killed.values())
