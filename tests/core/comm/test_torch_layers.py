"""Torch's layers over process groups do over ours what they do bare, to the bit: DTensor, tensor and pipeline
parallelism, functional collectives; FSDP2 where nothing is lost."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from core.comm.pg_harness import GroupJob, over_gloo
from harness import environment, plain_environment
from torch import distributed as dist

from ft_core import patched
from ft_core.comm.entries import Entry
from ft_core.comm.startup_log import Call
from ft_core.errors import ConfigError, ReplayMismatch
from ft_core.patching import replaced
from ft_core.worker import first_use

GLOO, STRICT = {"FT_COMM": ""}, {"FT_COMM": "strict"}
IN_PLACE = ("functional", "with_autograd", "dtensor", "tensor_parallel", "pipelined")
"""What can be done again over the same groups."""
ALL = (*IN_PLACE, "dealt_out", "sharded")
SCRIPT = str(Path(__file__).with_name("layer_scripts.py"))
STEPS = 6


@cache
def bare(world: int) -> list[dict[str, Any]]:
    """What each rank has of each layer over torch's own gloo."""
    from core.comm import layer_scripts  # which imports much

    return over_gloo(world, layer_scripts.bare)


def check(found: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    for role, expected in enumerate(bare(len(found))):
        for name in names:
            for what, value in expected[name].items():
                assert found[role][name][what] == value, (role, name, what)


@pytest.mark.parametrize(
    "world,comm",
    [
        (2, STRICT),
        pytest.param(2, GLOO, marks=pytest.mark.long),
        pytest.param(4, GLOO, marks=pytest.mark.long),
    ],
)
def test_all_in_training(world: int, comm: dict[str, str]) -> None:
    with GroupJob(world, "layer:in_training", ALL, environment=comm) as job:
        check(job.results(), ALL)


@pytest.mark.parametrize("comm", [GLOO, pytest.param(STRICT, marks=pytest.mark.long)])
def test_all_before_training(comm: dict[str, str]) -> None:
    with GroupJob(2, "layer:before_training", ALL, environment=comm) as job:
        check(job.results(), ALL)


@pytest.mark.parametrize(
    "world,comm,lost,at",
    [
        (2, GLOO, 1, 30),
        (2, STRICT, 0, 75),
        *(pytest.param(2, GLOO, at % 2, at, marks=pytest.mark.long) for at in (61, 120, 200)),
        *(pytest.param(2, STRICT, at % 2, at, marks=pytest.mark.long) for at in (20, 121, 200)),
        pytest.param(4, STRICT, 1, 90, marks=pytest.mark.long),
    ],
)
def test_a_role_is_lost_in_training(world: int, comm: dict[str, str], lost: int, at: int) -> None:
    """At one of their operations: groups, meshes and their submeshes go on with the newcomer."""
    with GroupJob(world, "layer:in_training", IN_PLACE, lost, at, environment=comm) as job:
        job.wait("stopped", [lost])
        job.kill(lost)
        job.next_epoch([lost])
        check(job.results(), IN_PLACE)


@pytest.mark.parametrize(
    "world,comm,lost",
    [
        (2, GLOO, 1),
        pytest.param(2, STRICT, 0, marks=pytest.mark.long),
        pytest.param(4, GLOO, 2, marks=pytest.mark.long),
    ],
)
def test_roles_are_lost_that_have_been_dealt_their_parts(world: int, comm: dict[str, str], lost: int) -> None:
    """What `distribute_tensor` scatters in start-up is on record, whoever is lost: also its source."""
    other = (lost + 1) % world
    with GroupJob(world, "layer:before_training", ("dealt_out",), lost, 6, environment=comm) as job:
        job.wait("stopped", [lost])
        job.kill(lost)
        job.next_epoch([lost])
        job.wait("trains")
        job.kill(other)
        job.next_epoch([other])
        check(job.results(), ("dealt_out",))


def test_a_large_scatter_is_left_to_restore() -> None:
    for kind, lenient, fine in (
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.int64, True, False),
    ):
        call = Call(1, "scatter", ([torch.zeros(3, dtype=kind)], [], dist.ScatterOptions()), {})
        entry = Entry("scatter", call.signature, None)
        with contextlib.nullcontext() if fine else pytest.raises(ReplayMismatch, match="on this role only"):
            call.apply(entry, "here", lenient)


def run(module: str, words: list[str], variables: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", module, "--standalone", "--nproc-per-node=2", *words],
        **{"env": variables, "timeout": 120, "text": True, "capture_output": True},
    )
    return done.returncode, done.stdout + done.stderr


def told(output: str) -> set[str]:
    """What the ranks have printed: two at once may do so on one line, as under `torchrun`."""
    return set(re.findall(r"step \d+ loss \d+\.\d+|rank \d ends with [0-9a-f]{64}", output))


@cache
def undisturbed(how: str) -> set[str]:
    code, output = run("torch.distributed.run", [SCRIPT, str(STEPS), how], plain_environment())
    assert code == 0, output[-4000:]
    assert len(told(output)) == STEPS + 2
    return told(output)


@pytest.mark.parametrize(
    "comm,how",
    [
        (GLOO, "cold"),
        pytest.param(GLOO, "warm", marks=pytest.mark.long),
        pytest.param(STRICT, "cold", marks=pytest.mark.long),
    ],
)
def test_a_loop_of_ones_own_with_parts_and_pipelines(comm: dict[str, str], how: str, tmp_path: Path) -> None:
    """A stage of a pipeline learns in its first step what the others send; newcomers know nothing of that.

    That step may be one of start-up.
    """
    expected = undisturbed(how)
    inject = "1@forward:1:worker,1@gradients:3:worker,0@optimizer:4:worker"
    words = ["--nnodes=1", "--ft-replicas=0", f"--job-dir={tmp_path / 'job'}", f"--ft-inject={inject}"]
    code, output = run("ft_core.cli.launch", [*words, SCRIPT, str(STEPS), how], environment() | comm)
    assert code == 0, output[-4000:]
    assert told(output) == expected
    events = (tmp_path / "job" / "events.jsonl").read_text()
    assert events.count('"event": "decided"') == 4, "nobody has begun anew"


def test_fully_shard_is_refused_in_a_protected_loop(tmp_path: Path) -> None:
    """Whoever has imported it, and when."""
    words = ["--nnodes=1", "--ft-replicas=0", f"--job-dir={tmp_path / 'job'}"]
    code, output = run("ft_core.cli.launch", [*words, SCRIPT, "1", "sharded"], environment())
    assert code != 0 and not told(output)
    why = "a model is wrapped in torch's fully_shard, whose steps cannot be done again"
    assert f"this job cannot be protected: {why}" in output, output[-4000:]


def installed(session: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install what concerns one module that is imported already."""
    now = lambda name, patch: patch(module) if name == module.__name__ else None  # noqa: E731
    monkeypatch.setattr(first_use, "after_import", now)
    first_use.install(session)


def test_a_first_random_operation_of_dtensor_in_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exchanges random states once, which newcomers would do alone. To be tried whole it needs a GPU."""
    from torch.distributed.tensor import _random

    made: list[tuple[Any, ...]] = []
    session = MagicMock(protecting=True)
    make = {"__init__": lambda self, *args: made.append(args)}
    with replaced(_random.OffsetBasedRNGTracker, make):
        installed(session, _random, monkeypatch)
        session.comms.startup.recording = True
        _random.OffsetBasedRNGTracker("mesh")
        session.comms.startup.recording = False
        _random.OffsetBasedRNGTracker("mesh", run_state_sync=False)
        with pytest.raises(ConfigError, match="Do one before"):
            _random.OffsetBasedRNGTracker("mesh")
        session.protecting = False
        _random.OffsetBasedRNGTracker("mesh")
    assert made == [("mesh", True), ("mesh", False), ("mesh", True)]


def test_pipelines_of_other_versions_are_not_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose stages cannot be told to learn anew."""
    from torch.distributed.pipelining import schedules

    session = MagicMock(protecting=False)
    kind = schedules._PipelineSchedule
    with replaced(kind, {"__init__": kind.__init__}):
        monkeypatch.delattr(kind, patched.STAGES.name)
        installed(session, schedules, monkeypatch)
        kind.__init__(MagicMock(), 2)
    session.unprotected.assert_called_once()
