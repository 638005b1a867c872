"""Nodes that are about to go are drained: `control.prestart.notices`, in the controller's machine."""

from __future__ import annotations

import pytest
from core.control.prestart.test_drain import commit, known, start, stop
from core.control.test_controller_machine import ControlPlane, lose

from ft_core.control.events import Terminate
from ft_core.control.prestart.attempts import ATTEMPTS
from ft_core.control.prestart.notices import AGAIN, OTHERS, SIGTERM
from ft_core.process.sigterm import GRACE
from ft_core.protocol.messages import Drain, Leaving, Message, Notice, SendCounts, Shutdown


def training(spares: int = 1, **settings: object) -> ControlPlane:
    job = ControlPlane(nodes=2, spares=spares, **settings)
    job.all_step(1)
    return job


def answers(job: ControlPlane, name: str) -> list[Message]:
    return [message for message in job[name].heard if isinstance(message, Drain)]


def test_a_notice_is_a_drain() -> None:
    job = training()
    job["node1"].say(Notice("AWS, spot/instance-action: terminate", 120.0))
    [notice] = job.records_of("notice")
    assert notice.more == {"node": "node1", "seconds": 120.0} and notice.roles == (1,)
    [begun] = job.records_of("draining")
    assert begun.reason == notice.reason and job["node1"].draining
    assert any("node1 goes in 120 s: AWS, spot/instance-action: terminate (role 1)" in s for s in job.said)
    job["node1"].say(Notice("AWS, spot/instance-action: terminate", 119.0))
    job.wait(0.1)
    start(job, 1, on="node2")
    stop(job, 0, 1)
    job.all_report()
    job.all_step(2)
    job.wait(0.1)
    known(job)
    commit(job, 2)
    job.wait(1)
    assert job["node1"].heard[-1] == Shutdown(code=0, drained=True)
    assert len(job.records_of("notice")) == len(job.records_of("draining")) == 1
    assert not job.records_of("detected") and not job.records_of("not_drained")


def test_a_notice_that_cannot_be_followed_is_once_it_can() -> None:
    job = training(spares=0)
    job["node1"].say(Notice("maintenance", None))
    assert "seconds" not in job.records_of("notice")[0].more
    job.wait(1)
    [refused] = job.records_of("not_drained")
    assert "other nodes have workers for 0" in refused.reason and not job.records_of("draining")
    job.join("node9")
    job["node9"].beat()
    job.wait(1.1)
    assert job.records_of("draining") and job["node1"].draining


def test_a_notice_in_a_recovery_waits_for_its_end() -> None:
    job = training(spares=2)
    lose(job, "node0")
    assert job.phase == "quiescing"
    job["node1"].say(Notice("maintenance", None))
    job.wait(0.2)
    assert not job.records_of("draining") and not job.records_of("not_drained")
    job.all_report()
    job.wait(0.1)
    assert job.records_of("draining")[0].more == {"node": "node1"}


def test_a_notice_that_is_taken_back_is_forgotten() -> None:
    job = training(spares=0)
    job["node1"].say(Notice("maintenance", None))
    job["node1"].say(Notice("", None))
    job.join("node9")
    job["node9"].beat()
    job.wait(1)
    assert not job.records_of("draining")


def test_who_has_less_time_goes_first() -> None:
    job = training(spares=2)
    job["node0"].say(Notice("maintenance", None))
    job["node1"].say(Notice("spot", 30.0))
    assert job.controller.cluster.draining == ["node1", "node0"]


def test_a_node_whose_roles_could_not_start_elsewhere_is_tried_again_later() -> None:
    job = training()
    job["node1"].say(Notice("maintenance", None))
    for _ in range(ATTEMPTS):
        job.wait(0.1)
        start(job, 1, on="node2")
        job["node2"].say(job["node2"].crash(1))
        job["node2"].idle += 1
        job["node2"].beat()
    job.wait(0.1)
    assert job.records_of("not_drained") and not job.controller.cluster.draining
    job.wait(AGAIN - 1)
    assert len(job.records_of("draining")) == 1
    job.wait(2)
    assert len(job.records_of("draining")) == 2


def test_a_notice_in_ever_other_words_is_one() -> None:
    """It is neither told again and again, nor tried any sooner."""
    job = training(spares=0)
    for left in range(120, 100, -1):
        job["node1"].say(Notice(f"gone in {left} s", float(left)))
        job.wait(1)
    assert len(job.records_of("notice")) == len(job.records_of("not_drained")) == 1
    job["node1"].say(Notice("now", 5.0))
    job.wait(0.1)
    assert len(job.records_of("notice")) == len(job.records_of("not_drained")) == 2


def test_who_is_drained_already_and_has_less_time_by_now_leaves_without_room() -> None:
    job = training(spares=1, policy="shrink", groups=2)
    job["node1"].say(Notice("maintenance", None))
    job.wait(0.1)
    assert job.controller.cluster.draining == ["node1"]
    job["node1"].say(Notice("spot", 30.0))
    lose(job, "node2")
    assert not job.records_of("not_drained")
    stop(job, 0)
    stop(job, 1)
    assert job.records_of("shrinking")


def test_sigterm_to_a_node_drains_it() -> None:
    job = training()
    job["node1"].say(Leaving())
    job.wait(OTHERS - 0.2)
    assert not job.records_of("draining"), "the others may be told as well"
    job.wait(0.4)
    assert job.records_of("draining")[0].reason == SIGTERM
    assert answers(job, "node1") == [Drain(wanted=True)]


def test_sigterm_is_news_once_however_often_it_is_said() -> None:
    job = training()
    job["node1"].say(Leaving())
    job["node1"].greet()
    job["node1"].say(Leaving())
    assert len(job.records_of("leaving")) == 1


def test_sigterm_to_a_node_that_cannot_be_drained_is_answered() -> None:
    job = training(spares=0)
    job["node1"].say(Leaving())
    job.wait(OTHERS + 0.2)
    assert answers(job, "node1") == [Drain(wanted=False)] and not job.records_of("draining")


@pytest.mark.parametrize("recovers", [True, False])
def test_sigterm_to_a_node_in_a_recovery_is_answered_when_that_is_over(recovers: bool) -> None:
    """What the node holds is needed, and may be nowhere else."""
    job = training()
    lose(job, "node0")
    job["node1"].say(Leaving())
    job.wait(OTHERS + 0.2)
    assert answers(job, "node1") == [Drain(wanted=True)] and not job.records_of("draining")
    if recovers:
        job.all_report()
        job.wait(0.2)
        assert len(job.records_of("decided")) == 2
        assert answers(job, "node1") == [Drain(wanted=True)], "others do not hold it yet"
        job.all_step(2)
        job.wait(0.2)
    else:  # as the others do not say what they have
        job.wait(GRACE)
    assert answers(job, "node1") == [Drain(wanted=True), Drain(wanted=False)]


def test_sigterm_to_all_is_answered_at_once_and_nobody_is_drained() -> None:
    """With the controller's process, or where that is told later."""
    job = training()
    job["node1"].say(Leaving())
    job.happens(Terminate())
    job["node0"].say(Leaving())
    job.wait(0.1)
    for name in ("node0", "node1"):
        assert answers(job, name) == [Drain(wanted=False)]
    assert not job.records_of("draining")


def test_sigterm_to_all_nodes_where_any_may_lead() -> None:
    job = training(spares=0)
    for name in ("node0", "node1"):
        job[name].say(Leaving())
    for name in ("node0", "node1"):
        job.wait(0.05)
        assert answers(job, name) == [Drain(wanted=False)]


def test_a_drain_by_sigterm_gives_way_to_the_end_of_the_job() -> None:
    job = training()
    job["node1"].say(Leaving())
    job.wait(OTHERS + 0.2)
    job.wait(0.1)
    start(job, 1, on="node2")
    job.happens(Terminate())
    job.wait(0.1)
    assert answers(job, "node1") == [Drain(wanted=True), Drain(wanted=False)]
    assert not job.controller.cluster.draining and job.records_of("not_moving")
    assert not job.records_of("moving")


def test_another_controller_goes_on_with_what_was_announced() -> None:
    job = training()
    job["node1"].say(Notice("maintenance", 60.0))
    job["node1"].say(Leaving())
    job.start_controller()
    for name in list(job.agents):
        job[name].greet()
    job["node1"].say(Notice("maintenance", 59.0))
    job["node1"].say(Leaving())
    job.wait(3)
    assert job.controller.cluster.draining == ["node1"]
    assert job["node1"].draining


def test_without_room_a_replica_group_leaves_between_two_steps() -> None:
    """In time, where the policy is to go on without it. A notice without a deadline is no reason."""
    job = training(spares=0, policy="shrink", groups=2)
    job["node1"].say(Notice("maintenance", None))
    job.wait(0.2)
    assert job.records_of("not_drained") and not job.records_of("draining")
    job["node1"].say(Notice("spot", 30.0))
    job.wait(0.1)
    assert job.records_of("draining") and not job.records_of("preparing")
    stop(job, 0)
    assert job.phase == "running", "the other has yet to stop"
    stop(job, 1)
    [left] = job.records_of("shrinking")
    assert left.roles == (1,) and "[1] leave with node node1" in left.reason
    job.all_report()
    plan = job["node0"].plan
    assert plan is not None and plan.roles == {0: "node0"} and plan.version == 1
    assert not job.records_of("detected")
    job.all_step(2)
    job.wait(1)
    assert job.controller.cluster.draining == ["node1"] and not job.records_of("moving")
    job.join("node9")
    job["node9"].beat()
    job.wait(0.1)
    assert any(isinstance(message, SendCounts) for message in job["node0"].heard), "it is to come back"


def test_a_group_that_is_about_to_leave_stays_if_the_job_ends_or_somebody_dies() -> None:
    job = training(spares=0, policy="shrink", groups=2)
    job["node1"].say(Notice("spot", 30.0))
    job.wait(0.1)
    stop(job, 0)
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    job.wait(0.1)
    assert job.records_of("detected") and not job.records_of("shrinking")
    assert job.phase == "running" and job.controller.cluster.places == {0: "node0", 1: "node1"}
