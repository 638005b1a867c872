"""Torch's own suite of process groups, out of the installed wheel, passes with ours as it does bare."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "torch_suite" / "run.py"
WORLD = 4

QUICK = (
    *("test_all_gather_coalesced_simple", "test_all_gather_object_subgroup", "test_all_reduce_coalesced_sum"),
    *("test_all_reduce_sum_async", "test_all_to_all_single_unequal_split", "test_barrier"),
    *("test_batch_isend_irecv_gloo_tags", "test_broadcast", "test_DistributedDataParallelCPU"),
    *("test_gather_object", "test_irecv", "test_isend_autograd_profiler", "test_monitored_barrier_gloo"),
    *("test_new_subgroups_with_group_param", "test_reduce_product", "test_send_recv_any_source"),
)
"""One of each kind."""

DIFFERENT = {
    "test_ddp_logging_data_cpu": "to torch's C++ a group is called `ft`, as it would take one that is called "
    "`gloo` for an object of its own; Python is told `gloo`",
}
"""Tests that pass bare and not with ours, on purpose, and why."""


GLOOS = re.compile(
    "|".join(
        (
            "tags",  # NCCL knows none
            "any_?source",  # NCCL receives from one
            "irecv|isend",  # what was waited for need not be done
            "monitored_barrier|timeout",  # nothing ends by itself
            "send_recv_.*profiler",  # another thread issues gloo's operations
            "sparse|test_all_to_all(?!_single)",  # not there, with gloo underneath
        )
    )
)
"""Tests that NCCL's rules do not allow, and why."""


def outcomes(directory: Path, how: str, names: Iterable[str], limit: float) -> dict[str, set[str]]:
    """What became of each test on any rank."""
    directory.mkdir()
    binaries = Path(sys.executable).parent
    command = [str(binaries / ("torchrun" if how == "bare" else "ftrun")), "--standalone"]
    command += [f"--nproc-per-node={WORLD}"]
    if how != "bare":
        command += ["--nnodes=1", f"--job-dir={directory / 'job'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(directory / "output", "w") as output:
        process = subprocess.Popen(
            [*command, str(RUN), str(directory), how, *names],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)
    assert process.returncode == 0, (directory / "output").read_text()[-5000:]
    found: dict[str, set[str]] = {}
    for rank in range(WORLD):
        for line in (directory / str(rank)).read_text().splitlines():
            name, outcome, _ = json.loads(line)
            found.setdefault(name, set()).add(outcome)
    return found


@pytest.mark.parametrize("how", ["before", "training"])
def test_one_of_each_kind(how: str, tmp_path: Path) -> None:
    """Before the first step, and in a job that trains."""
    assert outcomes(tmp_path / how, how, QUICK, 150) == {name: {"passed"} for name in QUICK}


def test_one_of_each_kind_that_nccl_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its rules, in a job that trains."""
    monkeypatch.setenv("FT_COMM", "strict")
    names = [name for name in QUICK if not GLOOS.search(name)]
    assert len(names) > 8
    assert outcomes(tmp_path / "strict", "training", names, 150) == {name: {"passed"} for name in names}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tests that pass with torch's own groups."""
    found = outcomes(tmp_path_factory.mktemp("torch") / "bare", "bare", ["*"], 150)
    names = [name for name, outcome in found.items() if outcome == {"passed"}]
    assert len(names) > 80 and {*QUICK, *DIFFERENT} <= {*names}
    return names


@pytest.mark.long
@pytest.mark.parametrize("how", ["before", "training", "strict"])
def test_all_that_pass_bare(
    how: str, bare: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that differ on purpose; also under NCCL's rules."""
    if how == "strict":
        monkeypatch.setenv("FT_COMM", how)
        bare = [name for name in bare if not GLOOS.search(name)]
    found = outcomes(tmp_path / how, how.replace("strict", "training"), bare, 150)
    failed = {name: outcome for name, outcome in found.items() if outcome != {"passed"}}
    assert failed.keys() == DIFFERENT.keys(), failed
