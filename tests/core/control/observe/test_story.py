"""What the console is told of what happens: a line for each failure and recovery, in the events' words."""

from __future__ import annotations

import re
from dataclasses import replace

from core.control.prestart.test_drain import commit, drain, known, moved
from core.control.test_controller_machine import ControlPlane, lose

from ft_core.control.events import Greeted
from ft_core.control.observe.story import FEW, TOGETHER
from ft_core.protocol.messages import DurableFailed, Unprotected
from ft_core.settings import Command


def news(job: ControlPlane) -> list[str]:
    """What was said since the last call, with its numbers of seconds as `N`."""
    said, job.said = job.said, []
    assert all(line.startswith("ftrun: ") and "\n" not in line for line in said)
    return [re.sub(r"\d+\.\d s", "N s", line.removeprefix("ftrun: ")) for line in said]


def training(**about: object) -> ControlPlane:
    job = ControlPlane(**about)  # type: ignore[arg-type]
    job.all_step(1200)
    job.wait(1.0)
    assert not news(job), "all is well"
    return job


def test_a_worker_dies_and_another_has_its_role() -> None:
    job = training(nodes=2)
    job["node0"].say(job["node0"].crash(0))
    assert news(job) == ["failure in step 1,201: worker 1000 of role 0 on node0: killed by SIGKILL"]
    job.all_report()
    job.wait(2.0)
    job.all_step(1201)
    recovered = (
        "recovered after N s: role 0 on node0, state from memory; at step 1,201: nothing was lost but "
        "the step under way"
    )
    assert news(job) == [recovered]
    [resumed] = [record for record in job.records_of("resumed") if record.epoch == 2]
    assert re.sub(r"\d+\.\d s", "N s", resumed.reason) == recovered, "events and page say the same"


def test_a_node_is_lost_and_a_step_with_it() -> None:
    job = training(nodes=3, spares=1)
    job["node0"].say(job["node0"].crash(0))
    for agent in job.agents.values():  # node1 alone had kept the newest of role 0
        agent.replicas = {segment: versions[:1] for segment, versions in agent.replicas.items()}
        agent.versions = {role: versions[:1] for role, versions in agent.versions.items()}
    lose(job, "node1")
    first, second = news(job)
    assert first.startswith("failure in step 1,201: worker ")
    assert second == "failure in step 1,201: node node1 lost: its agent's connection broke (role 1)"
    job.all_report()
    job.all_step(1200)
    [line] = news(job)
    assert line.startswith("recovered after N s: roles 0, 1 on node0, node3, state from memory; ")
    assert line.endswith("at step 1,200: step 1,200, which was lost, is done again")


def test_of_many_nodes_that_are_lost_at_once_a_screenful_is_said() -> None:
    job = training(nodes=40, spares=40, groups=40)
    gone = [f"node{number}" for number in range(30)]
    for name in gone:
        job.agents.pop(name).hangs_up()
    job.wait(1.0)
    assert len(news(job)) == FEW
    job.all_report()
    [line] = news(job)
    assert re.fullmatch(r"22 further failures: (node\d+, ){15}node\d+ and 6 more", line)
    job.all_step(1201)
    [line] = news(job)
    assert line.count("node") == 16 and "roles 0, 1, " in line and len(line) < 400


def test_nodes_without_roles_come_and_go() -> None:
    job = training(nodes=2, spares=2)
    job.join("expected")
    assert not news(job)
    lose(job, "node3")
    assert news(job) == ["a node without a role is gone: node node3: its agent's connection broke"]
    job.wait(TOGETHER)
    job.join("late")
    assert news(job) == ["node late has joined"]
    for number in range(30):
        job.join(f"more{number}")
    lose(job, "node2")
    assert news(job) == ["a node without a role is gone: node node2: its agent's connection broke"]
    job.wait(TOGETHER)
    [line] = news(job)
    assert line.startswith("30 nodes have joined, as spares: more0, more1, ") and line.endswith("and 14 more")


def test_a_recovery_that_fails_is_a_part_of_the_next() -> None:
    job = training(nodes=3, spares=1)
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    job.wait(1.0)
    lose(job, "node1")
    job.all_report()
    job.all_step(1201)
    first, second, recovered = news(job)
    assert "role 0 on node0" in first and "node1 lost" in second
    assert recovered.startswith("recovered after N s: roles 0, 1 on node0, node3, state from memory; ")
    assert (job.records_of("resumed")[-1].epoch, len(job.records_of("decided"))) == (3, 3)


def test_a_node_comes_back_too_late() -> None:
    job = training(nodes=2, spares=1)
    gone = job["node1"]
    lose(job, "node1")
    job.all_report()
    job.all_step(1201)
    news(job)
    gone.peer = next(job.peers)
    job.happens(Greeted(gone.peer, gone.hello()))
    assert news(job) == ["node node1 is back, too late: it joins again as a spare"]


def test_a_node_is_taken_out() -> None:
    job = moved()
    asked, done = news(job)
    assert asked == "node node1 is taken out (ftctl drain) (role 1)"
    assert done == "role 1 on node2: moved within N s, the others stood still meanwhile; at step 2"
    job.wait(0.5)
    known(job)
    commit(job, 2)
    job.wait(2.0)
    commit(job, 3)
    job.wait(2.0)
    assert news(job) == ["node node1 is out: it plays no role, and all that it kept is elsewhere"]


def test_a_node_that_is_taken_out_is_lost() -> None:
    job = training(nodes=2, spares=1)
    drain(job, "node1")
    lose(job, "node1")
    _, stays, lost = news(job)
    assert stays == "node node1 is not taken out: the node was lost before" and "node1 lost" in lost


def test_replica_groups_leave_and_come_back() -> None:
    job = training(nodes=2, groups=2, policy="shrink")
    lose(job, "node1")
    job.all_report()
    job.all_step(1201)
    failure, away, recovered = news(job)
    assert "node node1 lost" in failure and recovered.startswith("recovered after N s: state from memory; ")
    assert away == "replica groups 1 are away; the others go on"


def test_a_new_controller() -> None:
    job = training(nodes=2)
    job.start_controller()
    for agent in job.agents.values():
        agent.greet()
    for agent in job.agents.values():
        for message in agent.kept():
            agent.say(message)
    job.wait(5.0)
    assert job.phase == "running" and news(job) == [
        "a new controller has taken over: plan of epoch 1 taken over"
    ]


def test_that_nothing_is_protected_is_said_once() -> None:
    job = ControlPlane(nodes=2)
    for role in range(2):
        job[f"node{role}"].say(Unprotected(role, "it wants none", so_far=False))
    said = (
        "this job is not protected: it wants none; a failure costs all that its script has not saved itself"
    )
    assert news(job) == [said]
    job.start_controller()
    for agent in job.agents.values():
        agent.greet([Unprotected(agent.rank, "it wants none", so_far=False)])
    for message in job["node0"].kept():
        job["node0"].say(message)
    job.wait(3.0)
    assert job.phase == "running" and said not in news(job)
    assert job.controller.view.numbers(0.0, 0.0).unprotected == "it wants none"
    assert len(job.records_of("unprotected")) == 1
    job["node0"].say(job["node0"].crash(0))
    assert job.said[-1].endswith("; the job is not protected: it wants none") and "--ft" not in job.said[-1]


def test_who_trains_without_having_asked_may_ask_yet() -> None:
    job = ControlPlane(nodes=2)
    job["node0"].say(Unprotected(0, "it has not asked", so_far=True))
    assert len(news(job)) == 1 and job.controller.view.numbers(0.0, 0.0).unprotected == "it has not asked"
    job.all_step(1)
    assert not news(job) and not job.controller.view.numbers(0.0, 0.0).unprotected
    job["node0"].say(job["node0"].crash(0))
    assert job.done is None


def test_a_program_of_its_own_is_not_protected() -> None:
    job = ControlPlane(nodes=1)
    assert not job.records_of("unprotected")
    command = Command("./train", no_python=True)
    job.settings, job.agents = replace(job.settings, command=command), {}
    job.records.clear()
    job.start_controller()
    job.join("node0", 0)
    job.wait(0.1)
    [line] = news(job)
    assert line.startswith("this job is not protected: it is a program of its own (--no-python); ")


def test_a_checkpoint_that_could_not_be_written() -> None:
    job = training(nodes=2)
    job["node0"].say(DurableFailed(role=0, version=1200, reason="no space left"))
    job["node1"].say(DurableFailed(role=1, version=1200, reason="no space left"))
    assert news(job) == [
        "the durable checkpoint of step 1,200 could not be written: node node0: no space left"
    ]
