"""A job whose nodes reach the controller through one of them: any may be lost, that one as well."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness import Job, Layout, check_clean, check_identical

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 160


def test_one_node_speaks_for_all_and_each_is_lost(tmp_path):
    ftrun = ("--ft-direct-nodes", "1", "--respawn")
    with Job(tmp_path / "job", LAYOUT, STEPS, spares=1, ftrun=ftrun, script=PACED) as job:
        job.wait_for("joined", 3)
        job.wait_for("resumed")
        first = {event["node"] for event in job.events() if event["event"] == "joined"}
        job.kill_worker(1)
        epoch = job.wait_for_epoch("resumed", 2)["epoch"]
        for turn, role in enumerate((0, 1, 0)):
            nodes = {entry["role"]: entry["node"] for entry in job.status()["roles"]}
            if turn == 1:
                os.kill(job.status()["controller_pid"], signal.SIGKILL)
                job.wait_for("controller_restarted")
            first.remove(nodes[role])
            job.kill_nodes(role)
            epoch += 1
            assert job.wait_for_epoch("decided", epoch)["roles"] == [role], "nobody else is lost with it"
            job.wait_for_epoch("resumed", epoch)
        assert not first, "each of those that began, so also who spoke for the others"
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_clean(result)
    assert not result.of("spare_lost") and not result.of("given_up")
