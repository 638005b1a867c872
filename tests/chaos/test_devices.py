"""A device that is broken, in whole jobs."""

from __future__ import annotations

from pathlib import Path

from harness import Job, Layout, check_identical

SCRIPT = Path(__file__).parent / "broken_device.py"
STEPS = 40


def test_a_device_that_is_broken_costs_one_recovery(tmp_path, monkeypatch):
    """Its role goes on elsewhere at once, though its node has a standby for it."""
    layout, where = Layout(1, 1, 2, distributed=True), tmp_path / "broken"
    monkeypatch.setenv("FT_TESTS_BROKEN", str(where))
    with Job(tmp_path / "job", layout, STEPS, script=SCRIPT) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        where.with_suffix(".new").write_text("node1")
        where.with_suffix(".new").rename(where)
        job.wait_for("resumed", 2)
        assert [row["node"] for row in job.status()["roles"]] == ["node0", "node2"]
        result = job.finish()
    check_identical(result, layout, STEPS)
    [detected] = result.of("detected")
    assert (detected["fault"], detected["node"], detected["roles"]) == ("device", "node1", [1])
