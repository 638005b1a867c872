"""Nodes are taken out of whole jobs, between two steps: nothing is done again, and nobody fails."""

from __future__ import annotations

from pathlib import Path

from harness import Job, Layout, Result, check_identical

PACED = Path(__file__).parent / "paced.py"
STEPS = 40


def drain(job: Job, role: int) -> str:
    """The node that plays `role`; until it is out."""
    [node] = [row["node"] for row in job.status()["roles"] if row["role"] == role]
    assert node in job.ctl("drain", node)
    out = job.wait_for("drained", 1 + len([e for e in job.events() if e["event"] == "drained"]))
    assert out[-1]["node"] == node
    return node


def check_nobody_failed(result: Result) -> None:
    assert not result.of("detected") and not result.of("avoided") and not result.of("not_moving")
    assert result.of("moving") and len(result.of("drained")) == len(result.of("draining"))
    assert {step: len(lines) for step, lines in result.losses.items() if len(lines) > 1} == {}


def test_a_node_is_drained(tmp_path):
    layout = Layout(1, 1, 2, distributed=True)
    with Job(tmp_path / "job", layout, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        node = drain(job, 1)
        rows = job.status()["roles"]
        assert [row["node"] for row in rows] == ["node0", "node2"] and node == "node1"
        result = job.finish()
    check_identical(result, layout, STEPS)
    check_nobody_failed(result)
