"""A node is taken out on purpose: `control.prestart.draining`, in the controller's machine."""

from __future__ import annotations

from typing import Any

import pytest
from core.control.test_controller_machine import Agent, ControlPlane, lose, sent

from ft_core.control import succession
from ft_core.control.events import Effect, Received
from ft_core.control.prestart.attempts import ATTEMPTS, STANDBY_GRACE
from ft_core.control.prestart.stop import ASK_AGAIN
from ft_core.protocol.messages import (
    AskRows,
    AskStatus,
    Completed,
    Denied,
    Drain,
    DrainNode,
    Drains,
    JobStatus,
    NodesChanged,
    NodesStatus,
    OperationCounts,
    PauseAfterStep,
    PausedAtStep,
    Prepare,
    Prepared,
    SendCounts,
    SendHeartbeat,
    Shutdown,
    Withdraw,
)

ALL = "0-1:1#0"


def drain(job: ControlPlane, name: str) -> Drains | Denied:
    """Ask for it."""
    peer = next(job.peers)
    effects = job.happens(Received(peer, DrainNode(name)))
    return {**sent(effects, Drains), **sent(effects, Denied)}[peer]


def refused(job: ControlPlane, name: str) -> str:
    answer = drain(job, name)
    assert isinstance(answer, Denied) and not job.records_of("draining")
    return answer.error


def start(job: ControlPlane, role: int, on: str) -> list[Effect]:
    """The newcomer of a role starts, and is ready for its state."""
    for agent in list(job.agents.values()):
        for each in [each for each in agent.workers if job.controller.cluster.places.get(each) == agent.name]:
            agent.say(OperationCounts(role=each, counts={ALL: 3}))
    prepare = next(message for message in reversed(job[on].heard) if isinstance(message, Prepare))
    assert prepare.roles == [role] and prepare.surrogates.expanded() == {role: role}
    assert prepare.completed == {ALL: (3, 0)} and prepare.counterparts.expanded() == {}
    job[on].workers[role], job[on].idle = next(job.pids), job[on].idle - 1
    return job[on].say(Prepared(role=role, counts={ALL: 3}))


def stop(job: ControlPlane, *roles: int) -> None:
    """Those who train do, at the end of a step."""
    playing = {job.controller.cluster.places[role] for role in job.roles}
    for name in playing:
        job[name].beat()
    epoch = job.controller.cluster.epoch
    for name in playing:
        hold = [message for message in job[name].heard if isinstance(message, PauseAfterStep)][-1]
        assert hold.epoch == epoch and hold.step > max(agent.step_now for agent in job.agents.values()) - 1
    for role in roles:
        job[job.controller.cluster.places[role]].say(PausedAtStep(epoch=epoch, role=role))


def moved(**settings: Any) -> ControlPlane:
    """Role 1 has moved from node1 to node2, and all have made a step since."""
    job = ControlPlane(nodes=2, spares=1, **settings)
    job.all_step(1)
    assert drain(job, "node1") == Drains("node1", 1, [])
    job.wait(0.1)
    start(job, 1, on="node2")
    stop(job, 0, 1)
    job.all_report()
    job.all_step(2)
    return job


def known(job: ControlPlane) -> None:
    """All know which node keeps no copies any more."""
    for agent in job.agents.values():
        asked = [message.number for message in agent.heard if isinstance(message, SendHeartbeat)]
        if asked:
            agent.answers = asked[-1]
            agent.beat()


def commit(job: ControlPlane, version: int) -> None:
    for agent in list(job.agents.values()):
        agent.committed = version
        agent.beat()


def test_roles_move_between_two_steps_and_then_the_node_ends() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    assert drain(job, "node1") == Drains("node1", 1, [])
    assert job["node1"].draining and job.records_of("draining")[0].more == {"node": "node1"}
    effects = job.wait(0.1)
    assert sent(effects, SendCounts).keys() == {job["node0"].peer, job["node1"].peer}
    effects = start(job, 1, on="node2")
    assert sent(effects, SendHeartbeat).keys() == {job["node0"].peer, job["node1"].peer}
    stop(job, 0)
    assert job.phase == "running", "the role that moves trains on until all stop"
    job["node1"].say(PausedAtStep(epoch=1, role=1))
    assert job.records_of("moving")[0].roles == (1,)
    job.all_report()
    plan = job["node2"].plan
    assert plan is not None and plan.roles == {0: "node0", 1: "node2"}
    assert plan.version == 1 and plan.newcomers == [1]
    assert job.records_of("decided")[-1].more["moved"] == {1: "node2"}
    assert job["node2"].plan is not None and job["node2"].plan.sources[1], "node1 has what it goes on from"
    assert not job.records_of("detected") and job.controller.cluster.setbacks.attempts_without_progress == 0
    job.all_step(2)
    effects = job.wait(0.1)
    assert sent(effects, NodesChanged)[job["node0"].peer].nodes == {"node1": None}
    assert not job.records_of("drained"), "copies may have gone there that were on their way"
    known(job)
    commit(job, 1)
    job.wait(1)
    assert not job.records_of("drained"), "of that version, too"
    commit(job, 2)
    job.wait(1)
    assert job.records_of("drained")[0].more == {"node": "node1"}
    assert job["node1"].heard[-1] == Shutdown(code=0, drained=True)
    assert job.phase == "running" and "node1" not in job.controller.cluster.nodes
    assert not job.controller.cluster.strikes.places()


def test_who_answers_before_it_knows_does_not_count() -> None:
    """A beat may have been on its way."""
    job = moved()
    job.wait(0.1)
    commit(job, 9)
    job.wait(2)
    assert not job.records_of("drained")
    job["node0"].silent = job["node2"].silent = True
    known(job)
    job.wait(1)
    assert job.records_of("drained")


def test_who_has_lost_its_connection_is_asked_again_who_keeps_copies() -> None:
    job = moved()
    job.wait(0.1)
    job["node2"].heard.clear()
    job["node2"].greet()
    order = [message for message in job["node2"].heard if isinstance(message, NodesChanged | SendHeartbeat)]
    assert isinstance(order[0], NodesChanged) and isinstance(order[-1], SendHeartbeat)
    known(job)
    commit(job, 9)
    job.wait(1)
    assert job.records_of("drained")


def test_an_epoch_begins_while_a_node_is_let_go() -> None:
    """It may be all that has what that goes on from; so it is let go in the next one, once more."""
    job = moved()
    job.wait(0.1)
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    plan = job["node0"].plan
    assert plan is not None and "node1" in plan.nodes and plan.roles == {0: "node0", 1: "node2"}
    known(job)
    commit(job, 9)
    job.wait(1)
    assert not job.records_of("drained")
    job.all_step(3)
    job.wait(0.1)
    known(job)
    commit(job, 9)
    job.wait(1)
    assert job.records_of("drained")


def test_without_room_it_is_refused_and_what_is_missing_is_said() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    error = refused(job, "node1")
    assert "1 roles would have to move, and other nodes have workers for 0" in error
    assert "ftrun --join host:1 --job-dir /job" in error and not job["node1"].draining
    assert "no such node: node7" in refused(job, "node7")


def test_the_only_node_stays() -> None:
    job = ControlPlane(nodes=1)
    job.all_step(1)
    assert "other nodes have workers for 0" in refused(job, "node0")


def test_roles_move_into_free_places_as_far_as_there_are_devices() -> None:
    job = ControlPlane(nodes=2, nproc=1, spares=0)
    job.all_step(1)
    job["node0"].idle = 5
    job["node0"].beat()
    assert "other nodes have workers for 0" in refused(job, "node1")


def test_a_node_stays_where_there_would_be_too_few_for_all_copies() -> None:
    job = ControlPlane(nodes=1, spares=1)
    job.all_step(1)
    error = refused(job, "node1")
    assert "1 failure domains would be left" in error and "--ft-replicas 1" in error


def test_a_spare_just_goes() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    assert drain(job, "node2") == Drains("node2", 0, [])
    job.wait(0.1)
    known(job)
    commit(job, 9)
    job.wait(1)
    assert job.records_of("drained") and not job.records_of("moving") and not job.records_of("spare_lost")
    assert job.controller.cluster.epoch == 1


def test_asked_twice_it_is_drained_once() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    assert drain(job, "node1") == drain(job, "node1") == Drains("node1", 1, [])
    assert len(job.records_of("draining")) == 1 and job.controller.cluster.draining == ["node1"]


def test_several_are_drained_one_after_the_other() -> None:
    job = ControlPlane(nodes=2, spares=2)
    job.all_step(1)
    assert drain(job, "node1") == Drains("node1", 1, [])
    assert drain(job, "node0") == Drains("node0", 1, ["node1"])
    [status] = sent(job.happens(Received(99, AskStatus())), JobStatus).values()
    assert status.draining == ["node1", "node0"]
    [nodes] = sent(job.happens(Received(99, AskRows("nodes"))), NodesStatus).values()
    assert [row.draining for row in nodes.nodes] == [True, True, False, False]
    job.wait(0.1)
    start(job, 1, on="node2")
    assert not any(isinstance(message, Prepare) for message in job["node3"].heard)
    stop(job, 0, 1)
    job.all_report()
    job.all_step(2)
    job.wait(0.1)
    start(job, 0, on="node3")
    stop(job, 0, 1)
    job.all_report()
    assert job.controller.cluster.places == {0: "node3", 1: "node2"}
    job.all_step(3)
    for _ in range(2):
        job.wait(0.6)
        known(job)
        commit(job, 9)
        job.wait(0.6)
    assert [record.more["node"] for record in job.records_of("drained")] == ["node1", "node0"]


def test_there_is_no_room_for_two() -> None:
    job = ControlPlane(nodes=2, spares=1, replicas=0)
    job.all_step(1)
    drain(job, "node1")
    answer = drain(job, "node2")
    assert isinstance(answer, Denied), "that is where the roles of node1 are to go"
    answer = drain(job, "node0")
    assert isinstance(answer, Denied) and "2 roles would have to move" in answer.error


def test_the_node_dies_before_its_newcomers_are_ready() -> None:
    """A recovery like any other; the places of those who were starting are free for it."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job.wait(0.1)
    idle = job["node2"].idle
    job["node2"].idle = 0
    job["node2"].beat()
    effects = lose(job, "node1")
    assert job.records_of("not_drained")[0].reason == "the node was lost before"
    assert sent(effects, Withdraw)[job["node2"].peer].roles == [1] and job.records_of("not_moving")
    job.all_report()
    assert job.phase == "waiting" and not job.records_of("waiting"), "a worker there is being replaced"
    job["node2"].idle = idle
    job["node2"].beat()
    job.wait(0.1)
    assert job.controller.cluster.places == {0: "node0", 1: "node2"} and not job.controller.cluster.draining


def test_the_node_dies_when_its_newcomers_are_ready() -> None:
    """They take over at once."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job.wait(0.1)
    start(job, 1, on="node2")
    lose(job, "node1")
    job.all_report()
    assert job.controller.cluster.places == {0: "node0", 1: "node2"} and job.phase == "running"
    assert not job.records_of("not_moving") and job.records_of("detected")


def test_a_role_elsewhere_fails_when_newcomers_are_ready() -> None:
    """They take part in the epoch that begins of it."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job.wait(0.1)
    start(job, 1, on="node2")
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    assert job.controller.cluster.places == {0: "node0", 1: "node2"}
    assert not job.records_of("not_drained") and job.controller.cluster.draining == ["node1"]


def test_another_node_that_dies_needs_the_place_more() -> None:
    """The drain gives way, and there is no room for it any more."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job.wait(0.1)
    start(job, 1, on="node2")
    lose(job, "node0")
    job.all_report()
    assert "others need the places more" in job.records_of("not_moving")[0].reason
    job["node2"].idle = 2
    job["node2"].beat()
    job.wait(0.1)
    assert job.controller.cluster.places == {0: "node2", 1: "node1"}
    job.all_step(2)
    job.wait(0.1)
    assert "other nodes have workers for 0" in job.records_of("not_drained")[0].reason
    assert not job["node1"].draining and not job.controller.cluster.draining


def newcomer_dies(job: ControlPlane, on: str = "node2") -> None:
    """Role 1 starts on a spare, and its worker crashes; another one is idle there."""
    job.wait(0.1)
    start(job, 1, on)
    job[on].say(job[on].crash(1))
    job[on].idle += 1
    job[on].beat()


def test_a_node_stays_where_nobody_comes_in_the_place_of_a_newcomer_that_died() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job.wait(0.1)
    start(job, 1, on="node2")
    job["node2"].idle = 0
    job["node2"].beat()
    job["node2"].say(job["node2"].crash(1))
    job.wait(STANDBY_GRACE - 1)
    assert job.controller.cluster.draining == ["node1"], "another standby may be on its way"
    job.wait(2)
    assert "other nodes have workers for 0" in job.records_of("not_drained")[0].reason


def test_newcomers_that_died_count_for_the_node_that_they_were_to_relieve() -> None:
    job = ControlPlane(nodes=2, spares=2)
    job.all_step(1)
    drain(job, "node1")
    for _ in range(ATTEMPTS - 1):
        newcomer_dies(job)
    lose(job, "node1")
    job.all_report()
    job.all_step(2)
    assert job.controller.cluster.places[1] == "node2"
    drain(job, "node2")
    newcomer_dies(job, on="node3")
    job.wait(0.1)
    assert [each.more["node"] for each in job.records_of("not_drained")] == ["node1"]
    assert job.controller.cluster.draining == ["node2"]


def test_newcomers_that_die_are_tried_again_and_then_the_node_stays() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    for number in range(ATTEMPTS):
        newcomer_dies(job)
        assert len(job.records_of("not_moving")) == 1 + number
    job.wait(0.1)
    assert "3 starts of its roles elsewhere failed" in job.records_of("not_drained")[0].reason
    assert job["node1"].heard[-1] == Drain(wanted=False) and job.phase == "running"
    assert not job.records_of("detected") and job.controller.cluster.epoch == 1
    assert isinstance(drain(job, "node1"), Drains), "whoever has mended it may ask again"
    job.wait(0.1)
    start(job, 1, on="node2")


def test_a_newcomer_that_dies_when_its_attempt_is_over_is_no_failure_of_its_role() -> None:
    """It was: after the last of three attempts the job went on from memory, all roles in new workers."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    for _ in range(ATTEMPTS):
        newcomer_dies(job)
    job.wait(0.1)
    assert job.records_of("not_drained")
    job["node2"].workers[1] = next(job.pids)  # of the last attempt, too
    job["node2"].say(job["node2"].crash(1))
    job.wait(0.1)
    assert not job.records_of("detected") and (job.phase, job.controller.cluster.epoch) == ("running", 1)


def test_a_newcomer_that_hangs_does_not_for_ever() -> None:
    job = ControlPlane(nodes=2, spares=1, hang_limit=60.0)
    job.all_step(1)
    drain(job, "node1")
    job.wait(59)
    assert not job.records_of("not_drained")
    effects = job.wait(2)
    assert "roles [1] were not ready" in job.records_of("not_drained")[0].reason
    assert sent(effects, Withdraw)[job["node2"].peer].roles == [1] and not job["node1"].draining


def test_nobody_is_cut_off_who_does_not_stop_in_time() -> None:
    """All are asked again."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job.wait(0.1)
    start(job, 1, on="node2")
    stop(job, 0)
    effects = job.wait(ASK_AGAIN + 0.2)
    assert job.phase == "running" and sent(effects, SendHeartbeat)
    stop(job, 0, 1)
    assert job.records_of("moving")


def test_a_successor_goes_on_with_it() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job.wait(0.1)
    start(job, 1, on="node2")
    job.start_controller()
    for agent in job.agents.values():
        agent.greet()
    job.wait(0.1)
    for agent in list(job.agents.values()):
        if agent.plan is not None:
            for message in agent.kept():
                agent.say(message)
            break
    job.wait(succession.GRACE + 0.5)
    assert job.controller.cluster.draining == ["node1"]
    assert any(isinstance(message, Withdraw) for message in job["node2"].heard), "who was starting ends"
    job.all_step(1)
    job.wait(0.1)
    start(job, 1, on="node2")
    stop(job, 0, 1)
    job.all_report()
    assert job.controller.cluster.places == {0: "node0", 1: "node2"}


def test_a_node_that_has_not_heard_what_became_of_it_is_told() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job["node1"].draining = False
    job["node1"].greet()
    assert job["node1"].draining
    job.wait(0.1)
    job.controller.cluster.draining.clear()
    job["node1"].greet()
    assert not job["node1"].draining


def test_a_drained_node_that_is_lost_and_comes_back_too_late_ends() -> None:
    job = moved()
    agent: Agent = job["node1"]
    lose(job, "node1")
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    job.agents["node1"] = agent
    agent.greet()
    assert agent.heard[-1] == Shutdown(code=0, drained=True) and not job.records_of("given_up")
    assert job.records_of("drained")[-1].more == {"node": "node1"}


def test_a_drained_node_is_given_no_role() -> None:
    """Nobody else has a place: the job waits for a node."""
    job = moved()
    lose(job, "node2")
    job.all_report()
    assert job.phase == "waiting" and job.records_of("waiting")
    job.join("node3")
    job.all_report()
    assert job.controller.cluster.places == {0: "node0", 1: "node3"}


def test_a_role_of_its_own_that_crashes_goes_elsewhere_or_back() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    assert job.controller.cluster.places == {0: "node0", 1: "node2"}
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    lose(job, "node2")
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    assert job.controller.cluster.places == {0: "node0", 1: "node1"}, "better than to wait"


def test_while_a_job_recovers_it_is_refused() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    job["node0"].say(job["node0"].crash(0))
    assert "the job is quiescing" in refused(job, "node1")
    job = ControlPlane(nodes=2)
    job.start_controller()
    job["node0"].plan = None
    job["node0"].greet()
    assert "the job is forming" in refused(job, "node0")


def test_before_the_first_step_of_an_epoch_it_waits() -> None:
    job = ControlPlane(nodes=2, spares=1)
    assert drain(job, "node1") == Drains("node1", 1, [])
    assert not sent(job.wait(1), SendCounts)
    job.all_step(1)
    assert sent(job.wait(0.1), SendCounts)


def test_at_the_end_of_the_script_it_is_refused_and_a_drain_is_left_at_that() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    drain(job, "node1")
    for role in job.roles:
        job[f"node{role}"].say(Completed(epoch=1, role=role, part=1, version=1, last=True))
    assert not sent(job.wait(1), SendCounts)
    answer = drain(job, "node0")
    assert isinstance(answer, Denied) and "has come to its end" in answer.error


def test_where_groups_are_away_they_come_back_elsewhere() -> None:
    job = ControlPlane(nodes=2, groups=2, policy="shrink", spares=1)
    job.all_step(1)
    drain(job, "node2")
    lose(job, "node1")
    job.all_report()
    assert job.controller.cluster.places == {0: "node0"}, "the spare is being drained"
    job.all_step(2)
    assert not any(isinstance(message, Prepare) for message in job["node2"].heard)
    job.join("node3")
    job.wait(0.1)
    job["node0"].say(OperationCounts(role=0, counts={}))
    assert [m.roles for m in job["node3"].heard if isinstance(m, Prepare)] == [[1]]


@pytest.mark.parametrize("drained", ["node1", "node2"])
def test_where_a_group_that_comes_back_starts(drained: str) -> None:
    """One at a time; and it starts elsewhere than on a node that is drained meanwhile."""
    job = ControlPlane(nodes=3, groups=3, policy="shrink", replicas=0)
    job.all_step(1)
    lose(job, "node2")
    job.all_report()
    job.all_step(2)
    job.join("node3")
    job.join("node4")
    job.wait(0.1)
    for role in (0, 1):
        job[f"node{role}"].say(OperationCounts(role=role, counts={}))
    attempt = job.controller._recovery.prestart.attempt
    assert attempt is not None and not attempt.leaves
    [starting] = set(attempt.places.values())
    name = starting if drained == "node2" else "node1"
    assert isinstance(drain(job, name), Drains)
    job.wait(0.1)
    if drained == "node1":
        assert job.controller._recovery.prestart.attempt is attempt
    else:
        assert "is to be drained" in job.records_of("not_returning")[0].reason
        again = job.controller._recovery.prestart.attempt
        assert again is not None and starting not in again.places.values()
