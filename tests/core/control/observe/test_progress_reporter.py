"""What the console is told while a job forms or recovers: nothing while all is well."""

from __future__ import annotations

import re

from core.control.test_controller_machine import ControlPlane, lose

from ft_core.control.observe.progress_reporter import FIRST
from ft_core.protocol.messages import Restored, Unprotected


def news(job: ControlPlane) -> list[str]:
    """What was said since the last call, without the seconds at its end."""
    said, job.said = job.said, []
    assert all(line.startswith("ftrun: ") and "\n" not in line for line in said)
    return [re.sub(r" \(\d+ s\)$", "", line.removeprefix("ftrun: ")) for line in said]


def test_nothing_is_said_while_all_is_well() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    job.wait(10 * FIRST)
    lose(job, "node1")
    job.all_report()
    job.all_step(2)
    job.wait(10 * FIRST)
    assert job.phase == "running" and len(job.records_of("decided")) == 2
    assert len(news(job)) == 2, "the failure, and the recovery"


def test_a_job_that_forms_says_which_nodes_are_missing() -> None:
    """Each time after twice as long."""
    job = ControlPlane(nodes=3)
    job.agents.clear()
    job.start_controller()
    job.join("node0", 0)
    job.join("node2", 2)
    job.wait(FIRST - 0.2)
    assert not news(job)
    job.wait(0.4)
    line = "starting: 2 of 3 nodes are up; not here, or still importing: ranks 1"
    assert news(job) == [line]
    job.wait(FIRST - 1)
    assert not news(job)
    job.wait(30 * FIRST)
    assert news(job) == [line] * 4  # after 20, 40, 80 and 160 s
    job.join("node1", 1)
    job.wait(0.1)
    job.all_step(1)
    job.wait(0.1)
    assert job.phase == "running"
    [line] = job.said
    assert line.startswith("ftrun: all roles train, after 3")


def test_a_recovery_says_who_is_awaited() -> None:
    job = ControlPlane(nodes=3, spares=1)
    job.all_step(1)
    lose(job, "node1")
    assert len(news(job)) == 1
    job.all_report("node0", "node3")
    job.wait(FIRST)
    assert news(job) == ["recovering: workers leave their step; not yet: nodes node2"]
    job["node2"].report()
    assert job.phase == "running"
    job.wait(FIRST)
    late = "not yet: roles 0, 1, 2 on node0, node2, node3"
    assert news(job) == [f"recovering: 0 of 3 roles have their state; {late}"]
    job["node0"].step(0, 2)
    job.wait(2 * FIRST)
    late = "not yet: roles 1, 2 on node2, node3"
    assert news(job) == [f"recovering: 1 of 3 roles have their state; {late}"]
    for role, name in ((1, "node3"), (2, "node2")):
        job[name].say(Restored(epoch=2, role=role, pid=1, version=1, loaded=True))
    job.wait(4 * FIRST)
    assert news(job) == [f"recovering: 1 of 3 roles have finished a step; {late}"]
    job.all_step(2)
    job.wait(10 * FIRST)
    assert len(job.said) == 1 and job.said[0].startswith("ftrun: recovered after ")


def test_a_job_that_waits_says_for_whom() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    job.wait(FIRST)
    said = news(job)[1:]
    assert job.phase == "waiting" and said == ["waiting for a node; without a worker: roles 1"]


def test_nothing_is_said_of_scripts_that_say_nothing() -> None:
    """Of one without fault tolerance nobody knows how far it is; that it is one is said once."""
    job = ControlPlane(nodes=2)
    for role in range(2):
        job[f"node{role}"].say(Unprotected(role, "it wants none", so_far=False))
    job.wait(10 * FIRST)
    assert job.phase == "running" and len(news(job)) == 1
