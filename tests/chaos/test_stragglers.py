"""One of four roles is a fifth slower than the others, in whole jobs: it is named, and moves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness import Job, check_identical
from loading_jobs import Loading

STEPS = 400
"""At most of which the others wait for it."""


@dataclasses.dataclass(frozen=True)
class Slow(Loading):
    """The same script, whose nodes may be slow."""

    @property
    def script(self) -> Path:
        return Path(__file__).parent / "slow.py"


@pytest.mark.parametrize("part", ["compute", "data"])
def test_who_is_slow_is_named_and_its_node_taken_out(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, told = Slow(("--num-workers=0",), world=4), tmp_path / "slow"
    monkeypatch.setenv("FT_TESTS_SLOW", str(told))
    with Job(tmp_path / "job", training, STEPS, ftrun=("--ft-straggler=replace",)) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 5)
        told.with_suffix(".new").write_text(f"node2 {part}")
        told.with_suffix(".new").rename(told)
        job.wait_for("straggler")
        assert job.wait_for("drained")[-1]["node"] == "node2"
        assert [row["node"] for row in job.status()["roles"]] == ["node0", "node1", "node4", "node3"]
        result = job.finish()
    check_identical(result, training, STEPS)
    named, over = result.of("straggler")
    assert (named["roles"], named["node"], named["part"], named["over"]) == ([2], "node2", part, False)
    assert (over["roles"], over["node"], over["over"]) == ([2], "node2", True)
    assert named["score"] >= 1.15 and "role 2 on node2 is slow" in result.output
    [begun] = result.of("draining")
    assert begun["reason"] == named["reason"] and result.of("moving")
    [avoided] = result.of("avoided")
    assert avoided["node"] == "node2" and not result.of("detected")
