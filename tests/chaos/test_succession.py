"""The leader's machine is lost: another node runs the controller, by a lease in etcd."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import etcd_members
from etcd_members import Members
from harness import Layout, check_identical, check_survivors
from machines import Machines

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 300  # two successions take 5 s each at best, and a failure has to come after them


def lose_the_leader(job: Machines) -> int:
    """With its machine, if nobody trains there, for which another comes; else the controller alone. Returns
    the step reached."""
    machine, pid = job.leader()
    if machine.spare:
        machine.kill()
        job.start(LAYOUT.world)
    else:
        os.kill(pid, signal.SIGKILL)
    return job.step()


@etcd_members.needed
def test_the_leader_is_lost_and_training_does_not_notice(tmp_path):
    with Members() as etcd, Machines(tmp_path, etcd.place("job"), LAYOUT, STEPS, PACED, spares=2) as job:
        job.until(lambda: job.events("resumed"), "first step")
        for number in range(2):
            terms = len({event["term"] for event in job.events("controller_restarted")})
            reached = lose_the_leader(job)
            if not number:
                etcd.kill(0)
            job.until_step(reached + 5)
            job.until(
                lambda terms=terms: len({e["term"] for e in job.events("controller_restarted")}) > terms,
                "successor",
            )
        assert len(job.events("state_restored")) == 1
        lost = job.events("state_restored")[-1]["pids"]["1"]
        os.kill(lost, signal.SIGKILL)
        job.until(lambda: len(job.events("resumed")) > 1, "recovery")
        result = job.finish()
    check_identical(result, LAYOUT, STEPS, again=1)
    check_survivors(result, LAYOUT.world)
    decided = [(event["term"], event["epoch"]) for event in result.of("decided")]
    assert decided == sorted(decided) and decided[-1][0] >= 3
