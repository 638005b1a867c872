"""A script that ends on one role alone ends the job, with a word of which; one that ends on all is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job, check_clean
from loading_jobs import Loading

FEW = ("--num-workers=0",)


@pytest.mark.parametrize(
    ("leave", "code", "said"),
    [
        ("1:3:exit", 1, "role 1 came to the end of its script after step 3"),
        ("1:3:fail", 3, "of role 1 on node1: exit code 3"),
        ("1:3:_exit", 1, "of role 1 on node1: exit code 0, in the middle of training"),
        ("all:3:exit", 0, ""),
    ],
)
def test_scripts_that_leave(leave: str, code: int, said: str, tmp_path: Path) -> None:
    training = Loading((*FEW, f"--leave={leave}"))
    with Job(tmp_path / "job", training, 1000, spares=0, ftrun=("--max-restarts=0",)) as job:
        result = job.finish(60)
    assert result.code == code, result.output
    assert said in result.output
    assert max(result.losses) == 3
    assert not result.recoveries, "what a script does itself is no failure"
    check_clean(result)
