"""Nodes that are sick when they come, in whole jobs: a computation with a known answer goes wrong there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness import Job, Layout, check_identical

SCRIPT = Path(__file__).parent / "checked.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 40


def sick(tmp_path: Path, monkeypatch, *nodes: str) -> None:
    """These compute wrongly."""
    where = tmp_path / "sick"
    where.write_text(" ".join(nodes))
    monkeypatch.setenv("FT_TESTS_SICK", str(where))


def checked(job: Job) -> dict[str, str]:
    """By node, what its newest check has come to."""
    return {e["node"].partition("+")[0]: e["found"] for e in job.events() if e["event"] == "checked"}


def playing(job: Job) -> set[str]:
    """The nodes that do."""
    return {row["node"].partition("+")[0] for row in job.status()["roles"]}


def test_a_sick_spare_is_not_used(tmp_path, monkeypatch):
    """While there is another; and once there is none it is, rather than wait."""
    sick(tmp_path, monkeypatch, "node2")
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=2, script=SCRIPT) as job:
        job.wait_for("resumed")
        job.wait_for("checked", 2)
        assert checked(job) == {"node2": "sick", "node3": "ok"}
        [device] = job.wait_for("device")
        assert device["node"].startswith("node2") and "computes wrongly" in device["reason"]
        assert "node2" in job.console() and "check of computation" in job.console()
        for role, expected in ((0, "node3"), (1, "node2")):
            resumed = len(job.wait_for("resumed"))
            agent, _ = job.pids(role)
            os.killpg(agent, signal.SIGKILL)
            job.wait_for("resumed", resumed + 1)
            assert job.status()["roles"][role]["node"].partition("+")[0] == expected
        [needed] = job.wait_for("used_in_need")
        assert needed["node"].startswith("node2") and needed["roles"] == [1]
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)


def test_a_sick_node_is_left_out_at_the_start(tmp_path, monkeypatch):
    """And a node that comes back is checked, and used."""
    sick(tmp_path, monkeypatch, "node0")
    flags = ("--ft-preflight=all", "--respawn")
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=1, script=SCRIPT, ftrun=flags) as job:
        job.wait_for("resumed")
        assert checked(job) == {"node0": "sick", "node1": "ok", "node2": "ok"}
        assert playing(job) == {"node1", "node2"}
        names = [e["event"] for e in job.events()]
        assert "checked" not in names[names.index("decided") :], "all were checked before the first step"
        agent, _ = job.pids(1)
        os.killpg(agent, signal.SIGKILL)
        job.wait_for("resumed", 2)
        assert job.wait_for("used_in_need")[0]["node"].startswith("node0"), "rather than wait"
        back = job.wait_for("checked", 4)[3]
        assert back["found"] == "ok"
        assert job.wait_for("drained")[0]["node"].startswith("node0"), "there is another now"
        assert playing(job) == {"node2", back["node"].partition("+")[0]}
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)


def test_a_job_of_sick_nodes_does_not_begin(tmp_path, monkeypatch):
    sick(tmp_path, monkeypatch, "node1")
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=0, script=SCRIPT, ftrun=("--ft-preflight=all",)) as job:
        assert job.process.wait(100)
        [stopped] = job.wait_for("stopped")
        assert "node1" in stopped["reason"] and "computes wrongly" in stopped["reason"]
        assert "--ft-preflight joining" in job.console()
        assert not [e for e in job.events() if e["event"] == "decided"]
