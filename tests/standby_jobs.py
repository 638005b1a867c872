"""Jobs whose standbys have started the roles of their node ahead of need."""

from __future__ import annotations

import os
import signal

from harness import Job


def standby(job: Job, role: int, but: int = 0) -> int:
    """The pid of the one that is ready for that role, once there is one, other than `but`."""

    def found() -> int:
        pid = next(row["ready"] for row in job.status()["roles"] if row["role"] == role) or 0
        return 0 if pid == but else pid

    return job.until(found, f"a standby for role {role}", timeout=120)


def kill(job: Job, role: int) -> int:
    """The pid of the role's worker after its worker was killed, and all go on."""
    _, worker = job.pids(role)
    before = job.wait_for("resumed")[-1]["epoch"]
    os.kill(worker, signal.SIGKILL)
    job.wait_for_epoch("resumed", before + 1)
    return job.pids(role)[1]


def lose_workers(job: Job, world: int) -> int:
    """All that standbys must get over; returns how many recoveries that takes."""
    last = world - 1
    job.wait_for("resumed")
    ready = {role: standby(job, role) for role in range(world)}
    assert kill(job, last) == ready[last]
    assert {role: standby(job, role) for role in range(last)} == {role: ready[role] for role in range(last)}
    assert kill(job, 0) == ready[0], "through an epoch in which it was not needed"
    assert "a standby had started it ahead of need" in job.ctl("timeline")
    epoch = job.wait_for("resumed")[-1]["epoch"]
    # Its first one plays the role now; a heartbeat that is late does not say so yet.
    victim = standby(job, last, but=ready[last])
    os.kill(victim, signal.SIGKILL)
    again = standby(job, last, but=victim)
    assert job.wait_for("resumed")[-1]["epoch"] == epoch, f"one that is lost matters: {job.events()}"
    assert kill(job, last) == again
    assert kill(job, last) != again, "twice in a row: the second time no other is ready yet, perhaps"
    return 4


def lose_nodes(job: Job, world: int) -> int:
    """Both nodes, one after the other, from which a spare takes over that has started their roles; returns
    how many recoveries that takes."""

    def guarded() -> bool:
        return {role for spare in job.status()["spares"] for role in spare["guarding"]} == set(range(world))

    job.wait_for("resumed")
    for recoveries, role in enumerate((world - 1, 0), 1):
        job.until(guarded, "a spare that is ready for all roles", timeout=120)
        job.kill_nodes(role)
        epoch = job.wait_for("resumed", recoveries + 1)[-1]["epoch"]
        assert "a standby had started it ahead of need" in job.ctl("timeline", "--epoch", str(epoch))
        job.join()
    return 2
