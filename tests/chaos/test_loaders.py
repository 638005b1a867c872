"""Loaders have processes of their own, and run ahead of training: failures change none of what is trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import Job, check_clean, check_identical, check_survivors
from loading_jobs import Loading
from processes import alive, children

STEPS = 400


@pytest.mark.parametrize("more", [(), ("--persistent-workers",)], ids=["new each time", "kept"])
def test_loaders_with_processes(more: tuple[str, ...], tmp_path: Path):
    """A worker dies, whose loaders cannot end by themselves, and then a node, which another takes over."""
    training = Loading(more)
    with Job(tmp_path / "job", training, STEPS, nproc=1, spares=1) as job:
        job.wait_for_step(3)
        _, victim = job.pids(1)
        loaders = children(victim)
        assert len(loaders) == 2
        for pid in loaders:
            os.kill(pid, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        first = job.wait_for_epoch("resumed", 2)
        assert not [pid for pid in loaders if alive(pid)]
        job.wait_for_step(first["version"] + 3)
        job.kill_nodes(0)
        job.wait_for_epoch("resumed", 3)
        result = job.finish()
    check_identical(result, training, STEPS, again=2)  # each successor prints the newest line once more
    check_survivors(result, training.world)
    check_clean(result)
    assert "leaked" not in result.output
    for rank in range(training.world):
        assert result.output.count(f"UserWarning: told by rank {rank}") == 1, "successors say it again"
